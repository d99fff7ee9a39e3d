"""Training data of a draft head: replies that the target model writes, and what it computes on the way."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from emberline.engine.core.step_loop import StepLoop
from emberline.engine.runners.cpu.torch_runner import allocate_pool
from emberline.engine.training.eagle_training import TargetOutputs
from emberline.engine.worker.build import build
from emberline.engine.worker.main import parse_arguments
from emberline.kernels.backend import GroupedQueryAttention
from emberline.kernels.reference import TorchBackend, TorchStep, visible
from emberline.kv.block_pool import blocks_of
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.registry import ARCHITECTURES
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.weights.checkpoint import Checkpoint

SEQUENCES_AT_ONCE = 32  # in one forward pass of the target


def write_replies(
    model: Path,
    prompts: Sequence[bytes],
    temperatures: Sequence[float],
    max_tokens: int,
    device: str,
    progress: Callable[[int], None] = lambda n_done: None,
) -> list[bytes]:
    """The engine's reply to each prompt, at a temperature each. Prompts and replies are token ids, u32 LE."""
    own = ["--device", device, "--speculation", "off", *_share_of(device)]
    args = parse_arguments(["--model", str(model), "--socket", "unused", *own])
    loop = build(args).loop
    assert isinstance(loop, StepLoop), "the model generates text"
    replies = [b""] * len(prompts)
    n_done, most, waiting = 0, args.max_running, list(enumerate(prompts))[::-1]
    while n_done < len(prompts):
        while waiting and len(prompts) - len(waiting) - n_done < most:
            number, prompt = waiting.pop()
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperatures[number], seed=number)
            loop.submit(EngineRequest(id=str(number), prompt_ids=prompt, sampling=sampling), time.monotonic())
        for delta in loop.step(time.monotonic()):
            replies[int(delta.id)] += delta.token_ids
            if delta.finish is not None:
                n_done += 1
                progress(n_done)
    return replies


def _share_of(device: str) -> list[str]:
    """Flags that limit the engine's share of the GPU: the rest is for training."""
    return ["--memory-share", "0.3"] if device.startswith("cuda") else []


class SequencesBackend(TorchBackend):
    """Backend of steps whose rows are whole sequences of one length: one attention over all, without the cache."""

    def attend_to_cache(
        self, q: Tensor, k: Tensor, v: Tensor, attn: GroupedQueryAttention, context: TorchStep
    ) -> Tensor:
        if attn.sinks is not None:
            return super().attend_to_cache(q, k, v, attn, context)
        n = len(context.context_lens)
        length = len(q) // n
        assert context.context_lens == [length] * n, "whole sequences of one length"
        local = attn.window is not None or attn.chunk is not None
        mask = visible(context.step.positions[:length], length, attn.window, attn.chunk) if local else None
        q, k, v = (each.reshape(n, length, *each.shape[1:]).transpose(1, 2) for each in (q, k, v))
        out: Tensor = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=not local, scale=attn.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def plain_model(checkpoint: Checkpoint, device: str) -> Decoder:
    """The target in plain PyTorch, whose matrices are tensors; for `run_target`."""
    backend = SequencesBackend(device)
    return Decoder(checkpoint, backend, ARCHITECTURES[checkpoint.config.architecture])


def run_target(
    model: Decoder, taps: Sequence[int], sequences: Sequence[tuple[bytes, bytes]], length: int
) -> TargetOutputs:
    """The target over prompts and replies, cut or padded to `length` tokens each."""
    parts = []
    for start in range(0, len(sequences), SEQUENCES_AT_ONCE):
        parts.append(_run(model, taps, sequences[start : start + SEQUENCES_AT_ONCE], length))
    names = TargetOutputs.__slots__
    return TargetOutputs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def _run(model: Decoder, taps: Sequence[int], sequences: Sequence[tuple[bytes, bytes]], length: int) -> TargetOutputs:
    n, device, width = len(sequences), torch.device(model.device), blocks_of(length)
    ids, in_reply = np.zeros((n, length), np.int64), np.zeros((n, length), bool)
    for row, (prompt, reply) in enumerate(sequences):
        tokens = np.frombuffer(prompt + reply, "<u4")[:length]
        ids[row, : len(tokens)] = tokens
        in_reply[row, len(prompt) // 4 : len(tokens)] = True
    token_ids = torch.from_numpy(ids).to(device)
    counts = torch.arange(n, device=device, dtype=torch.int32)
    tables = 1 + counts[:, None] * width + torch.arange(width, device=device, dtype=torch.int32)
    pools = [allocate_pool(group, 1 + n * width, device) for group in model.kv_groups]
    step = StepInputs(
        token_ids=token_ids.flatten().int(),
        positions=torch.arange(length, device=device, dtype=torch.int32).repeat(n),
        query_starts=torch.arange(0, n * length + 1, length, device=device, dtype=torch.int32),
        context_lens=torch.full((n,), length, device=device, dtype=torch.int32),
        block_tables=[tables for _ in pools],
        sample_tokens=torch.empty(0, dtype=torch.int64, device=device),
    )
    hidden, taken = model.tapped(step, pools, tuple(taps))
    return TargetOutputs(
        token_ids=token_ids,
        in_reply=torch.from_numpy(in_reply).to(device),
        taps=torch.cat(taken, dim=-1).view(n, length, -1),
        hidden=hidden.view(n, length, -1),
        best=_best(hidden, model.head.weight).view(n, length),
    )


@torch.inference_mode()
def _best(hidden: Tensor, lm_head: Tensor) -> Tensor:
    return torch.cat([(part @ lm_head.T).argmax(-1) for part in torch.split(hidden, 4096)])
