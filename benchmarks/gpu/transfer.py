"""KV transfer between processes over CUDA IPC: `python -m benchmarks.gpu.transfer [--to GPU] [--model FOLDER]`.

Bandwidth for scattered blocks of Llama-8B's shape, 2 MiB each, every block compared on the receiving side, which is on
the same GPU or on another one (`--to`). With a model: the part of a 32k-token prompt's transfer that is not overlapped
by its prefill, between two real workers.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.block_hash import KVGroup

LLAMA_8B = KVGroup("full", tuple(range(32)), kv_heads=8, head_dim=128, dtype="bfloat16")
N_BLOCKS = 4097
SIZES = (16, 64, 256, 2048)
AS_JSON = {"EMBERLINE_LOG_FORMAT": "json"}


def main() -> int:
    args = _parse()
    if args.receive:
        return receive()
    figures = {"bandwidth": bandwidth(args.to)}
    if args.model is not None:
        figures["hidden"] = hidden(args.model, args.work, args.tokens, args.repeat)
    print(json.dumps(figures, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0


def receive() -> int:
    """The receiving process: exports a pool, then prints checksums of the blocks it is asked for."""
    from emberline.engine.runners.gpu.transfer import exported_pools, exporting

    pools, spans = exported_pools([LLAMA_8B], [N_BLOCKS], "cuda")
    opened, _ = exporting(pools, spans).opened()
    print(msgspec.json.encode(opened).decode(), flush=True)
    for line in sys.stdin:
        blocks = json.loads(line)
        print(json.dumps(_sums(pools[0], blocks)), flush=True)
    return 0


def _sums(pool: Any, blocks: list[int]) -> list[int]:
    """A checksum per block, weighted by position: a wrong or misplaced word changes it."""
    import torch

    words = pool.view(pool.shape[0], -1).view(torch.int32)
    weights = torch.arange(1, words.shape[1] + 1, device=words.device, dtype=torch.int64)
    return [int((words[block].long() * weights).sum()) for block in blocks]


def bandwidth(to: str | None = None) -> dict[str, Any]:
    """From the first GPU to `to`, as CUDA_VISIBLE_DEVICES names it; None: on the same one."""
    import torch

    from emberline.engine.runners.gpu.transfer import open_cuda_ipc, pool_words
    from emberline.kv.transfer.messages import TransportOpened
    from emberline.kv.transfer.transport import BlockCopy

    command = [sys.executable, "-m", "benchmarks.gpu.transfer", "--receive"]
    env = None if to is None else {**os.environ, "CUDA_VISIBLE_DEVICES": to}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert child.stdout is not None
    assert child.stdin is not None
    opened = msgspec.json.decode(child.stdout.readline(), type=TransportOpened)
    own = torch.randint(-(2**31), 2**31 - 1, (N_BLOCKS, LLAMA_8B.block_bytes // 4), dtype=torch.int32, device="cuda")
    words = pool_words(own, LLAMA_8B)
    transport = open_cuda_ipc([words], opened)
    [target] = transport.targets
    rng = random.Random(1)
    sources, targets = (rng.sample(range(1, N_BLOCKS), max(SIZES)) for _ in range(2))
    copies = [BlockCopy((0, j), source, put) for j, (source, put) in enumerate(zip(sources, targets))]
    figures: dict[str, Any] = {}
    for n in SIZES:
        some = copies[:n]
        figures[f"kernel_{n}"] = _rate(partial(transport.write, 0, some), n)
        figures[f"memcpy_{n}"] = _rate(partial(_memcpy, words, target, some), n)
    target.zero_()
    torch.cuda.synchronize()
    transport.write(0, copies)
    child.stdin.write(json.dumps(targets) + "\n")
    child.stdin.flush()
    figures["identical"] = json.loads(child.stdout.readline()) == _sums(own, sources)
    child.stdin.close()
    child.wait(20)
    return figures


def _rate(copy: Callable[[], None], n_blocks: int) -> float:
    """Median bandwidth in GB/s."""
    for _ in range(3):
        copy()
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        copy()
        times.append(time.perf_counter() - begun)
    return round(n_blocks * LLAMA_8B.block_bytes / sorted(times)[len(times) // 2] / 1e9, 1)


def _memcpy(source: Any, target: Any, copies: Any) -> None:
    """The baseline: one copy per block."""
    import torch

    for each in copies:
        target[each.target].copy_(source[each.source], non_blocking=True)
    torch.cuda.current_stream().synchronize()


def hidden(model: Path, work: Path, n_tokens: int, repeat: int) -> dict[str, Any]:
    """Between two real workers on one device; each prompt is new."""
    from benchmarks.gpu.engine import worker

    flags = ("--kv-bytes", str(14 << 30), "--max-running", "64", "--token-budget", "4096")
    logs = {role: work / f"{role}.log" for role in ("prefill", "decode")}
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(worker(model, logs[role], *flags, "--role", role, "--id", role, env=AS_JSON))
            for role in logs
        )
        rng = random.Random(5)
        prefill.client.generate([[rng.randrange(1000, 100_000) for _ in range(n_tokens)]], 1)  # compiles the kernels
        decode.client.generate([[7] * 64], 4)
        rounds = []
        for number in range(repeat):
            ids = [rng.randrange(1000, 100_000) for _ in range(n_tokens)]
            rounds.append(_hand_over(prefill, decode, ids, f"t{number}"))
        _, [reply] = prefill.client.generate([[rng.randrange(1000, 100_000) for _ in range(n_tokens)]], 1)
    late = [
        json.loads(line)["ms_after_compute"]
        for line in logs["prefill"].read_text().splitlines()
        if "ms_after_compute" in line
    ]
    return {"ttft_s": rounds, "ttft_alone_s": round(reply.ttft_s, 4), "ms_after_compute": late, "tokens": n_tokens}


def _hand_over(prefill: Any, decode: Any, ids: list[int], transfer: str) -> float:
    """TTFT of a disaggregated request, in seconds."""
    from emberline.protocol.frames import transfer_ticket
    from emberline.protocol.request import EngineRequest, Push, SamplingParams
    from emberline.protocol.token_ids import pack

    whole = EngineRequest(
        id=transfer,
        prompt_ids=pack(ids),
        sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        awaits=transfer,
    )
    push = Push(transfer=transfer, address=decode.facts["address"], ticket=transfer_ticket("", "sender"))
    half = msgspec.structs.replace(whole, id=f"{transfer}-p", awaits="", push=push)
    replies = [engine.client.begin(request) for engine, request in ((decode, whole), (prefill, half))]
    decode.client.run()
    prefill.client.run()
    if [reply.finish for reply in replies] != ["length", "stop"]:
        raise RuntimeError(f"the requests finished with {[reply.finish for reply in replies]}")
    return round(float(replies[0].ttft_s), 4)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.transfer", description=__doc__)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--to", metavar="GPU", help="of the receiving process, as CUDA_VISIBLE_DEVICES names it")
    parser.add_argument("--model", type=Path, help="a folder with an 8B's shape, as benchmarks.gpu writes it")
    parser.add_argument("--work", type=Path, default=Path("/tmp"), help="where logs go")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--repeat", type=int, default=4)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
