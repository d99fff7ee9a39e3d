"""Bursts of fresh prompts over HTTP on one GPU: `emberline serve`, and `vllm serve` in the same run.

python -m benchmarks.gpu.http [--streams 1 64 256] [--vllm DIR] [--repeats 3] [--out FILE]

Llama-3.1-8B's shape with random weights; prompts are token ids, so that both servers compute the same. Every burst has
new prompts, sent at once. `tok_s`: output tokens over the time from the first request sent to the last token.
`first_burst` is the first of all, right after the server says that it is ready.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.client import Reply, stream
from benchmarks.gpu import model_files
from benchmarks.gpu.workloads import Prompts, quantile
from benchmarks.process import Process, ended_by_sigterm, free_port

READY_S = 400.0
N_IN, N_OUT = 512, 256
SETTLE_S = 8.0  # after the first burst: for what a server prepares in idle time
MODEL = "llama"
VLLM_SERVER = Path(__file__).parents[1] / "peers" / "vllm_server.py"


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer of that size: the replies' texts are decoded by it, the prompts need none."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    vocab |= {f"Ġw{number}": number for number in range(len(alphabet), vocab_size)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072, "eos_token": "Ġw128001"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


async def burst(port: int, prompts: Prompts, n: int) -> dict[str, float]:
    def body() -> dict[str, Any]:
        more = {"ignore_eos": True, "temperature": 0.0, "stream_options": {"include_usage": True}}
        return {"model": MODEL, "prompt": prompts.of(N_IN), "max_tokens": N_OUT, "stream": True, **more}

    bodies = [body() for _ in range(n)]
    replies: list[Reply] = await asyncio.gather(*(stream(port, "/v1/completions", one) for one in bodies))
    n_short = sum(reply.output_tokens != N_OUT for reply in replies)
    assert not n_short, f"{n_short} of {n} replies have another length"
    seconds = max(reply.last_at for reply in replies) - min(reply.sent_at for reply in replies)
    waits = [reply.ttft_s for reply in replies]
    return {"tok_s": n * N_OUT / seconds, "ttft_p50_s": quantile(waits, 0.5), "ttft_max_s": max(waits)}


async def _until_ready(port: int, server: Process) -> float:
    end_s = time.perf_counter() + READY_S
    while time.perf_counter() < end_s:
        server.check()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            head = await asyncio.wait_for(reader.read(64), 5)
            writer.close()
            if b" 200" in head:
                return time.perf_counter() - server.started_at
        except (OSError, TimeoutError):
            pass
        await asyncio.sleep(0.2)
    raise TimeoutError(f"not ready; see {server.log}")


async def _measure(port: int, server: Process, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"ready_s": await _until_ready(port, server)}
    prompts = Prompts(args.seed)
    found["first_burst"] = await burst(port, prompts, max(args.streams))
    await asyncio.sleep(SETTLE_S)
    for n in args.streams:
        runs = [await burst(port, prompts, n) for _ in range(args.repeats)]
        found[f"streams_{n}"] = {key: median(run[key] for run in runs) for key in runs[0]} | {"runs": runs}
    return found


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    folder, port = args.work / MODEL, free_port()
    if name == "emberline":
        command = ["-m", "emberline.cli.main", "serve", str(folder), "--port", str(port), "--max-running", "256"]
        command += ["--speculation", "off"]  # drafts would profit from the repetitions of random weights
        env = {"EMBERLINE_HOME": str(args.work / "home")}
    else:
        command = [str(VLLM_SERVER), "--model", str(folder), "--served-model-name", MODEL]
        command += ["--port", str(port), "--max-num-seqs", "256", "--max-model-len", "40960"]
        env = {"PYTHONPATH": str(args.vllm), "TRITON_CACHE_DIR": str(args.work / "triton-vllm")}
    with Process([sys.executable, *command], args.work / f"{name}-http.log", {**os.environ, **env}) as server:
        return asyncio.run(_measure(port, server, args))


def main() -> int:
    ended_by_sigterm()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.http", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("/tmp/emberline-gpu"), help="working folder with 20 GB free")
    parser.add_argument("--out", type=Path, default=Path("gpu-http.json"))
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", nargs="+", default=["emberline", "vllm"])
    parser.add_argument("--add", action="store_true", help="to the figures already in --out")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="folder of an installed vLLM")
    args = parser.parse_args()
    config = {**model_files.LLAMA_8B, "num_hidden_layers": args.layers}
    model_files.write(args.work / MODEL, config)
    write_tokenizer(args.work / MODEL, config["vocab_size"])
    figures: dict[str, Any] = json.loads(args.out.read_text()) if args.add and args.out.exists() else {}
    for name in args.engines:
        if name == "vllm" and args.vllm is None:
            continue
        figures[name] = measure(name, args)
        args.out.write_text(json.dumps(figures, indent=1))
        print(name, json.dumps(figures[name]), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
