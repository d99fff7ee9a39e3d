"""Ranks as processes that share one GPU: all-reduces against a copy, and workers of several ranks against one of one.

`python -m benchmarks.gpu.rank_processes RANK SIZE STORE` is one such process; `all_reduce` starts them.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Reply, worker
from benchmarks.reply_comparison import TOP, RepliesDiffer, compare

SIZES = (2, 4, 8)  # processes
ROWS = (1, 8, 64, 256, 585, 2340)  # of `HIDDEN` bf16: 14 KiB to 32 MiB
HIDDEN = 7168  # of Kimi K2.5
CHECKED = ((1, HIDDEN), (64, HIDDEN), (3, 33), (512, HIDDEN))
LIMIT_S = 60.0  # of a group that hangs
CALLS = 40  # in a CUDA graph
COMMAND = ("-m", "benchmarks.gpu.rank_processes")
N_OUT = 8  # few: near ties end the comparison of a reply
TEMPERATURES = (0.0, 0.8)
LAYOUTS = {"tp2": ("--tp", "2"), "pp2": ("--pp", "2"), "tp2 pp2": ("--tp", "2", "--pp", "2")}  # of workers
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096, "hidden_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "eos_token_id": 1, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_TOLERANCE = 0.1  # of its logprobs: in bf16 sums in another order change them by 0.03, a wrong block of KV by 0.16
ONE_GPU = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}  # several ranks of a worker may share it


@contextlib.contextmanager
def multi_process_service() -> Iterator[bool]:
    """NVIDIA's MPS, with which kernels of several processes run at once; without it the GPU switches between them, in
    about 2 ms. False: it does not start here."""
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    with tempfile.TemporaryDirectory(prefix="mps", ignore_cleanup_errors=True) as folder:
        os.environ.update(dict.fromkeys(names, folder))
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=10, capture_output=True)
            started = True
        except (OSError, subprocess.SubprocessError):
            started = False
            for name in names:
                del os.environ[name]
        try:
            yield started
        finally:
            if started:
                subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", timeout=20, capture_output=True)
                for name in names:
                    del os.environ[name]


def all_reduce(size: int) -> dict[str, Any]:
    """By KiB: µs of the all-reduce and of a copy of the same bytes, both by all `size` processes at once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *COMMAND]
        ranks = [
            subprocess.Popen([*command, str(rank), str(size), f"{folder}/store"], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        try:
            replies = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    failed = {rank: process.returncode for rank, process in enumerate(ranks) if process.returncode}
    if failed:
        raise RuntimeError(f"of {size} ranks these failed (exit code by rank): {failed}")
    figures: dict[str, Any] = json.loads(replies[0])
    return figures


def run_rank(rank: int, size: int, store_path: str) -> dict[str, Any]:
    """Sums and gathers are compared with the host's first."""
    import torch
    import torch.distributed as dist

    from benchmarks.gpu.kernels import time_us
    from emberline.engine.ranks.peer_memory import PeerMemory

    store = dist.FileStore(store_path, size)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    torch.cuda.set_device(0)
    group = PeerMemory(store, "tp", rank, size, "cuda:0")
    generator = torch.Generator().manual_seed(1)
    for shape in CHECKED:
        parts = [torch.randn(shape, generator=generator).bfloat16() for _ in range(size)]
        x = parts[rank].cuda()
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        group.all_reduce(x)
        if not torch.equal(x.cpu(), total.bfloat16()):
            raise AssertionError(f"the sum of {shape} is not the host's")
        if not torch.equal(group.all_gather(parts[rank].cuda()).cpu(), torch.stack(parts)):
            raise AssertionError(f"the gathered {shape} are not the host's")

    def against_copy(rows: int) -> dict[str, float]:
        x = torch.zeros(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        y = torch.empty_like(x)
        reduced = time_us(lambda i: group.all_reduce(x), CALLS)
        copied = time_us(lambda i: y.copy_(x), CALLS)
        return {"us": reduced, "copy_us": copied, "ratio": reduced / copied}

    return {str(rows * HIDDEN * 2 >> 10): against_copy(rows) for rows in ROWS}


def same_tokens(work: Path, layout: str) -> dict[str, Any]:
    """Greedy and sampled replies of a worker of several ranks on one GPU, compared with those of one rank."""
    model = work / "tiny-config"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(TINY))
    flags = ("--device", "cuda", "--random-weights", "1", "--deterministic", "--kv-bytes", str(1 << 30))
    prompts = [[(7 * n + 3 * at) % 4000 + 2 for at in range(20 + 30 * n)] for n in range(8)]
    replies: dict[str, list[list[Reply]]] = {}
    seconds: dict[str, float] = {}
    for name, more in (("one", ()), ("several", LAYOUTS[layout])):
        log = work / f"{name}-rank.log"
        with worker(model, log, *flags, "--memory-share", "0.2", *more, env=ONE_GPU) as engine:
            runs = [engine.client.generate(prompts, N_OUT, each, logprobs=TOP) for each in TEMPERATURES]
        replies[name] = [made for _, made in runs]
        seconds[name] = sum(took_s for took_s, _ in runs)
    pairs = [
        (one.logprobs, other.logprobs, temperature == 0)
        for temperature, ones, others in zip(TEMPERATURES, replies["one"], replies["several"], strict=True)
        for one, other in zip(ones, others, strict=True)
    ]
    n_tokens, why = 0, ""
    try:
        n_tokens = sum(compare(one, other, TINY_TOLERANCE, greedy) for one, other, greedy in pairs)
    except RepliesDiffer as error:
        why = str(error)
    return {
        "same": not why and 2 * n_tokens >= len(pairs) * N_OUT,
        "why": why,
        "n_tokens": n_tokens,
        "one_rank_s": seconds["one"],
        "several_ranks_s": seconds["several"],
    }


if __name__ == "__main__":
    print(json.dumps(run_rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])), flush=True)
    os._exit(0)  # at once: no rank takes down memory that another maps
