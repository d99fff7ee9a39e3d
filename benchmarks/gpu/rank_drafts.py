"""One rank of a layout with a draft head, alone on one GPU: what a step that verifies drafts takes beside a plain one.

Times are of CUDA graphs of the model's and the head's kernels, without sampling and without communication. A draft
token that repeats its row's own token chooses nearly the same experts; the others choose at random. So routing is told
for drafts that are all random, and for drafts of which some repeat; the experts that a step touches are counted.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.rank_alone import TOKEN_BUDGET, Case, RankSteps, free_memory
from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import GIB
from emberline.engine.runners.gpu.draft_chain import CHAIN_DEPTHS
from emberline.engine.runners.gpu.rank_memory import StepMemory, bound_context, draft_weight_bytes
from emberline.kernels.backend import MoE
from emberline.kernels.gpu.backend import moe_block
from emberline.kernels.gpu.backend.workspace import StepShape
from emberline.kernels.gpu.moe_routing import Permutation, make_permutation
from emberline.kv.groups import all_sequences, split_bytes
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.draft_head import GpuDraftHead
from emberline.models.eagle3 import Eagle3Config, Eagle3Head, default_taps
from emberline.models.registry import load_model
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import ModelConfig

DRAFT_BATCHES = (16, 1, 64)
N_DRAFTS = 3
ACCEPTED = 0.65  # share of draft tokens that are accepted, each if those before it are
REPEATED = (1, 0)  # draft tokens of each row that are the row's own token
BYTES_PER_S = 4.26e12  # of an H200, measured
DRAFT_VOCABULARY = 32_000
VERIFY_RATIO = 1.15  # asked for: of a verify step over a plain one and the bytes of the further experts
SPEEDUP = 1.25  # asked for with 16 sequences


def head_config(config: ModelConfig, draft_vocabulary: int = DRAFT_VOCABULARY) -> Eagle3Config:
    """A published head for the model: a layer of its shape, with its latent attention. config: of the whole model; a
    rank's has its share of the heads."""
    base = Eagle3Config.of(config, min(draft_vocabulary, config.vocab_size))
    latent = config.latent
    dim = base.head_dim if latent is None else latent.nope + latent.rope
    kv_heads = base.n_kv_heads if latent is None else base.n_heads
    fields = {"latent": latent, "head_dim": dim, "n_kv_heads": kv_heads, "taps": default_taps(config.n_layers)}
    return Eagle3Config(**{name: getattr(base, name) for name in base.__struct_fields__} | fields)


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Takes in a step's tapped states, and writes the head's entries: a `models.decoder.Taps`."""

    head: GpuDraftHead
    pool: Tensor
    hidden: Tensor  # [tokens, hidden]
    scratch: Tensor

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.taps

    def take(self, n: int, residual: Tensor) -> None:
        self.head.add_tap(n, residual, self.hidden[: len(residual)])

    def end(self, step: StepInputs) -> None:
        n = len(step.token_ids)
        self.head.gather_taps(self.hidden[:n], self.scratch[:n])
        self.head.write_entries(step, self.hidden[:n], self.pool)


class DraftSteps(RankSteps):
    """Steps of a rank that verify drafts, and the head's chains. `kv`: the head's pool is the last one."""

    def __init__(self, model: Decoder, kv: list[Tensor], head: GpuDraftHead, most_tokens: int, **timed: Any) -> None:
        super().__init__(model, kv[:-1], **timed)
        self._n_blocks = min(self._n_blocks, len(kv[-1]) - 1)
        self._head = head
        states = (kv[-1].new_zeros(most_tokens, head.hidden_size) for _ in range(2))
        self._taken_in = TakenIn(head, kv[-1], *states)

    def verify_inputs(self, n_rows: int, n_drafts: int, n_repeated: int) -> StepInputs:
        """The context is that of `decode_inputs`, the draft tokens included."""
        plain, width = self.decode_inputs(n_rows), 1 + n_drafts
        ids = self._token_ids(n_rows * width).view(n_rows, width)
        ids[:, 1 : 1 + n_repeated] = ids[:, :1]
        back = torch.arange(1 - width, 1, dtype=torch.int32, device=ids.device)
        return replace(
            plain,
            token_ids=ids.flatten(),
            positions=(plain.positions[:, None] + back).flatten(),
            query_starts=plain.query_starts * width,
            sample_tokens=torch.arange(n_rows * width, device=ids.device),
            block_tables=[*plain.block_tables, plain.block_tables[0]],
            shape=StepShape(n_rows, drafts=True),
        )

    def verify(self, inputs: StepInputs) -> None:
        self._model.forward(inputs, self._kv, self._taken_in)

    def verify_us(self, inputs: StepInputs) -> float:
        return self._timed(lambda i: self.verify(inputs), 1)

    def chain_us(self, n_rows: int, depth: int) -> float:
        """The chain that drafts up to `depth` tokens behind each row."""
        inputs = replace(self.decode_inputs(n_rows), sample_tokens=torch.empty(0, dtype=torch.int64))
        hidden = self._taken_in.hidden[:n_rows]
        with torch.inference_mode():
            return self._timed(lambda i: self._chain(inputs, hidden, depth), 1)

    def _chain(self, inputs: StepInputs, hidden: Tensor, depth: int) -> None:
        for _ in range(depth):
            self._head.extend_in_place(inputs, hidden, self._taken_in.pool)
            self._head.logits(hidden)
            self._head.feed_back(hidden)


@contextmanager
def chosen_experts() -> Iterator[list[Tensor]]:
    """Inside, the experts of every layer that runs are kept: int32 [tokens, slots] of each, -1 where there is none."""
    kept: list[Tensor] = []

    def make(memory: Tensor, *shape: Any) -> Permutation:
        to = make_permutation(memory, *shape)
        kept.append(torch.full_like(to.ids, -1))
        return replace(to, ids=kept[-1])

    moe_block.make_permutation = make  # type: ignore[attr-defined]
    try:
        yield kept
    finally:
        moe_block.make_permutation = make_permutation  # type: ignore[attr-defined]


def n_touched(layers: Sequence[Tensor]) -> float:
    """Different experts of a layer, on average."""
    return mean(len(set(ids.flatten().tolist()) - {-1}) for ids in layers)


def shared_by_drafts(layers: Sequence[Tensor], width: int) -> float:
    """Share of a draft token's experts that its row's first token has chosen, too. width: tokens of a row."""
    shares = []
    for ids in layers:
        for row in ids.view(-1, width, ids.shape[1]).tolist():
            own = set(row[0]) - {-1}
            shares += [len(own & set(draft)) / max(1, len(own)) for draft in row[1:]]
    return mean(shares)


def expert_bytes(layers: Sequence[MoE]) -> float:
    """Bytes of one expert in all layers together."""
    tensors = [t for moe in layers for each in (moe.gate_up, moe.down) for t in (each.weight, each.scale)]
    return sum(t.nbytes / len(t) for t in tensors if t is not None)


def tokens_per_step(accepted: float = ACCEPTED, n_drafts: int = N_DRAFTS) -> float:
    """Expected tokens of a step: draft n counts if all before it do."""
    return sum(accepted**n for n in range(n_drafts + 1))


def measure_cell(steps: DraftSteps, moe: Sequence[MoE], n_rows: int, n_repeated: int) -> dict[str, float]:
    """A plain step, one that verifies drafts, and the chain behind it."""
    plain, inputs = steps.decode_inputs(n_rows), steps.verify_inputs(n_rows, N_DRAFTS, n_repeated)
    with chosen_experts() as kept:
        steps.forward(plain)
        n_plain = len(kept)
        steps.verify(inputs)
    touched, verified = n_touched(kept[:n_plain]), n_touched(kept[n_plain:])
    plain_us, verify_us = steps.step_us(plain), steps.verify_us(inputs)
    chain_us = steps.chain_us(n_rows, next(depth for depth in CHAIN_DEPTHS if depth >= N_DRAFTS))
    further_us = 1e6 * (verified - touched) * expert_bytes(moe) / BYTES_PER_S
    return {
        "context": int(plain.context_lens[0]),
        "plain_us": plain_us,
        "verify_us": verify_us,
        "chain_us": chain_us,
        "touched": touched,
        "verified": verified,
        "overlap": shared_by_drafts(kept[n_plain:], 1 + N_DRAFTS),
        "further_us": further_us,
        "ratio": verify_us / (plain_us + further_us),
        "speedup": tokens_per_step() * plain_us / (verify_us + chain_us),
    }


def drafts(case: Case, rank: int, batches: Sequence[int] = DRAFT_BATCHES) -> dict[str, Any]:
    """KV room under the case's limit with a draft head, and every cell's times. Each is printed as it comes."""
    gpu = case.planner.gpu
    limit = gpu.memory - int(gpu.context_gib * GIB)
    free_memory()
    model = load_model(generate_checkpoint(case.document, 1), "cuda", shard=case.shard(rank))
    weights = torch.cuda.memory_allocated()
    with torch.device("cuda"):
        whole = Eagle3Head(head_config(case.source.config))
    head = GpuDraftHead(whole, model)
    del whole
    free_memory()
    head_bytes = draft_weight_bytes(head)
    bounded: Limits = bound_context(case.planner.limits, model, limit - weights)
    step = StepMemory.of(model, bounded, speculates=True, head=head)
    model.kernels.reserve(step.sizes)
    groups = (*model.kv_groups, *head.kv_groups)
    room = limit - weights - head_bytes - step.total
    n_blocks = split_bytes(groups, room, TOKEN_BUDGET, case.max_running)
    kv = [
        torch.empty(n, *group.block_shape, dtype=torch.bfloat16, device="cuda").normal_()
        for n, group in zip(n_blocks, groups, strict=True)
    ]
    found: dict[str, Any] = {
        "weights_gib": weights / GIB,
        "head_gib": head_bytes / GIB,
        "kv_gib": case.layout.n_ranks * sum(pool.nbytes for pool in kv) / GIB,
        "kv_tokens": all_sequences(n_blocks),
    }
    print(json.dumps(found), flush=True)
    steps = DraftSteps(model, kv, head, max(batches) * (1 + N_DRAFTS))
    moe = [block for layer in model.layers if isinstance(block := layer.feed_forward, MoE)]
    found["cells"] = cells = {}
    for n_rows in batches:
        for n_repeated in REPEATED:
            name = f"{n_rows} sequences, {n_repeated} of {N_DRAFTS} drafts repeat"
            cells[name] = measure_cell(steps, moe, n_rows, n_repeated)
            print(json.dumps({name: cells[name]}), flush=True)
            gc.collect()
    return found
