"""Workers of several ranks on one GPU: what they draft, find on disk and compute over NCCL, compared with one rank.

`drafting`: suffix drafts in a pipeline of two stages, in deterministic mode: the same tokens as without drafts.
`disk`: prompts return to a worker of another number of ranks, which finds their KV on disk.
`over_nccl`: ranks that meet over TCP, as on two machines, so that all collectives are NCCL's. Several ranks on one GPU
need NCCL 2.30 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import PROGRAM, TOKEN_VARIABLE, Reply, Worker, wait_until_prepared, worker
from benchmarks.gpu.rank_processes import LAYOUTS, ONE_GPU, TEMPERATURES, TINY, TINY_TOLERANCE
from benchmarks.reply_comparison import TOP, RepliesDiffer, compare
from emberline.engine.tiers.opening import KEY_VARIABLE
from emberline.protocol import block_hash
from emberline.protocol.request import EngineRequest, SamplingParams, Speculation
from emberline.protocol.token_ids import pack

DRAFTING = ("pp2",)
NCCL = ("tp2", "pp2")
DISK = (("tp2", "one"), ("one", "tp2"))  # who writes, who reads
COMMON = ("--device", "cuda", "--random-weights", "1", "--kv-bytes", str(1 << 30), "--memory-share", "0.2")
REPEATED = 7  # the token that biased replies repeat: all drafts of it are accepted
N_DRAFTED_OUT = 160
N_DRAFTED = 4  # requests
N_OUT = 8  # few: near ties end the comparison of a reply
# KV of few bytes, and computing that takes longer than to read it: else the worker computes what the disk has.
SLOW = TINY | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 2, "max_position_embeddings": 32_768,
}  # fmt: skip
N_PROMPT, N_PROMPTS = 12_288, 3
DISK_BYTES = 2 << 30
READY_S = 120.0


def drafting(work: Path, layout: str) -> dict[str, Any]:
    """Greedy replies of a pipeline with suffix drafts and of one rank without, token by token."""
    model = _model(work, "slow", SLOW)  # the steps of a smaller one end before the host has drafted
    made: dict[str, list[list[int]]] = {}
    found: dict[str, Any] = {}
    for name, flags in (("one", ("--speculation", "off")), (layout, ("--speculation", "suffix", *LAYOUTS[layout]))):
        log = work / f"drafting-{name}.log"
        with worker(model, log, *COMMON, "--deterministic", *flags, env=ONE_GPU) as engine:
            if "cuda" in COMMON and flags[-1] != "off":
                wait_until_prepared(engine, log)  # drafts are left out before
            began_s = time.perf_counter()
            replies = [reply for each in _repetitive() for reply in _run(engine, [each])]  # few rows: drafts pay
            found[f"{name}_s"] = time.perf_counter() - began_s
            made[name] = [reply.tokens for reply in replies]
            usages = [reply.drafts for reply in replies if reply.drafts is not None]
            found["drafted"] = sum(each.drafted for each in usages)
            found["accepted"] = sum(each.accepted for each in usages)
    same = [one == other for one, other in zip(made["one"], made[layout], strict=True)]
    biased = [set(tokens) == {REPEATED} for tokens in made[layout]]
    return found | {
        "same": all(same) and found["accepted"] > 0,
        "equal": sum(same),
        "of": len(same),
        "biased": sum(biased),
    }


def _repetitive() -> list[EngineRequest]:
    """Prompts that repeat themselves. Every other reply repeats one token, so that its drafts are accepted."""
    asked = []
    for n in range(N_DRAFTED):
        prompt = [(7 * n + 3 * (at % 24)) % 4000 + 20 for at in range(60 + 30 * n)]
        bias = {REPEATED: 100.0} if n % 2 else {}
        sampling = SamplingParams(max_tokens=N_DRAFTED_OUT, ignore_eos=True, temperature=0.0, seed=n, logit_bias=bias)
        told = Speculation(report=True)
        asked.append(EngineRequest(id=f"d{n}", prompt_ids=pack(prompt), sampling=sampling, speculation=told))
    return asked


def _run(engine: Worker, requests: Sequence[EngineRequest]) -> list[Reply]:
    """All at once."""
    replies = [engine.client.begin(each) for each in requests]
    engine.client.run()
    wrong = [reply.finish for reply in replies if reply.finish != "length"]
    if wrong:
        raise RuntimeError(f"{len(wrong)} requests ended with {wrong[0]}")
    return replies


def disk(work: Path, first: str, second: str) -> dict[str, Any]:
    """TTFT of prompts that are new to `first`, and of the same ones on `second` from the disk that `first` has left."""
    model = _model(work, "slow", SLOW)
    found: dict[str, Any] = {}
    tokens: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        flags = ("--kv-disk-bytes", str(DISK_BYTES), "--kv-disk-path", folder, "--kv-host-bytes", "0")
        for name, layout in (("written", first), ("read", second)):
            log = work / f"disk-{name}.log"
            env = {**ONE_GPU, KEY_VARIABLE: "ab" * 32}
            with worker(model, log, *COMMON, *flags, *LAYOUTS.get(layout, ()), env=env) as engine:
                engine.client.generate([[9] * 600], 2)  # kernels
                replies = []
                for seed in range(N_PROMPTS):
                    replies += _run(engine, [_session(engine, seed)])
                _wait_until_saved(engine)
            tokens[name] = [reply.tokens for reply in replies]
            found[f"{name}_ttft_s"] = [round(reply.ttft_s, 4) for reply in replies]
            found[f"{name}_from_disk"] = [reply.by_tier.get("disk", 0) for reply in replies]
    return found | {
        "same_tokens": sum(one == other for one, other in zip(tokens["written"], tokens["read"], strict=True)),
        "same": all(n > 0.9 * N_PROMPT for n in found["read_from_disk"]),
    }


def _session(engine: Worker, seed: int) -> EngineRequest:
    ids = pack([(seed + 1) * (at * at + 7 * at) % 3900 + 20 for at in range(N_PROMPT)])
    keys = block_hash.chain(block_hash.root(engine.client.info.fingerprint, b""), ids)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, seed=1)
    return EngineRequest(id=f"s{seed}", prompt_ids=ids, sampling=sampling, keys=keys)


def _wait_until_saved(engine: Worker) -> None:
    """Until the disk tier has all prompts, which the worker's load reports tell."""
    end_s = time.perf_counter() + 20.0
    while time.perf_counter() < end_s:
        engine.client.generate([[5] * 40], 2)
        held = sum(tier.blocks for tier in engine.client.load.tiers if tier.name == "disk")
        if held >= N_PROMPTS * (N_PROMPT // 16 - 1):
            return
        time.sleep(0.1)


def over_nccl(work: Path, layout: str) -> dict[str, Any]:
    """Replies of ranks that were started by hand and meet over TCP, compared with those of one rank."""
    model = _model(work, "tiny-nccl", TINY)
    flags = (*COMMON, "--speculation", "off")
    prompts = [[(7 * n + 3 * at) % 4000 + 2 for at in range(20 + 30 * n)] for n in range(8)]
    made: dict[str, list[Reply]] = {}
    rendezvous = ("--rendezvous", f"tcp:127.0.0.1:{_free_port()}", *LAYOUTS[layout])
    env = {**ONE_GPU, TOKEN_VARIABLE: "a token of this benchmark"}
    found: dict[str, Any] = {}
    for name, more in (("one", ()), (layout, rendezvous)):
        other = None
        if more:
            place = ("--model", str(model), "--socket", "tcp:127.0.0.2:0", "--rank", "1")
            with (work / "nccl-rank1.log").open("wb") as sink:
                other = subprocess.Popen(
                    [sys.executable, *PROGRAM, *place, *flags, *more], env=os.environ | env, stdout=sink, stderr=sink
                )
        try:
            log = work / f"nccl-{name}.log"
            with worker(model, log, *flags, *more, env=env) as engine:
                runs = [engine.client.generate(prompts, N_OUT, each, logprobs=TOP) for each in TEMPERATURES]
            made[name] = [reply for _, replies in runs for reply in replies]
            found[f"{name}_s"] = sum(took_s for took_s, _ in runs)
        finally:
            if other is not None:
                other.kill()
                other.wait()
    n_tokens, why = 0, ""
    try:
        for n, (one, several) in enumerate(zip(made["one"], made[layout], strict=True)):
            n_tokens += compare(one.logprobs, several.logprobs, TINY_TOLERANCE, n < len(prompts))
    except RepliesDiffer as error:
        why = str(error)
    return found | {"same": not why and 2 * n_tokens >= len(made["one"]) * N_OUT, "why": why, "n_tokens": n_tokens}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _model(work: Path, name: str, config: dict[str, Any]) -> Path:
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
