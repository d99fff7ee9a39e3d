"""A returning session on a CPU whose KV was evicted from the device pool: from disk or host memory, or recomputed.

python -m benchmarks.kv_tiers [--tokens 3400] [--repeat 3] [--out FILE]

The default model, one worker, no other load. A session's prompt is computed, another session takes its place in the
device pool, and the first one returns: the time to its first token, without a tier, from disk, from disk after a
restart of the worker, and from host memory. Every reply must have the same tokens. The disk's pages are in the page
cache unless it reads directly.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.engine import Worker, worker
from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.config import home_dir

N_OUT = 16
BYTES_PER_TOKEN = 23_040  # of KV, SmolLM2-135M
GIB = str(1 << 30)


def main() -> int:
    args = _parse()
    model = args.model or ModelStore(args.home).resolve(DEFAULT_MODEL).path
    pool = ("--device", "cpu", "--kv-bytes", str(int(1.2 * args.tokens) * BYTES_PER_TOKEN))
    with tempfile.TemporaryDirectory(dir=args.folder) as text:
        folder, log = Path(text), args.log
        env = {"EMBERLINE_KV_KEY": "11" * 32}
        disk = (*pool, "--kv-disk-bytes", GIB, "--kv-disk-path", str(folder / "kv"))
        rounds: dict[str, list[dict[str, Any]]] = {}
        for seed in range(args.repeat):
            with worker(model, log, *pool) as engine:
                _note(rounds, "recomputed", returning(engine, args.tokens, seed))
            with worker(model, log, *disk, env=env) as engine:
                _note(rounds, "from disk", returning(engine, args.tokens, seed))
            with worker(model, log, *disk, env=env) as engine:
                _note(rounds, "from disk, restarted", again(engine, args.tokens, seed))
            with worker(model, log, *pool, "--kv-host-bytes", GIB) as engine:
                _note(rounds, "from host memory", returning(engine, args.tokens, seed))
    figures = summary(rounds)
    print(json.dumps(figures, indent=1))
    print(table(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1))
    return 0 if figures["identical"] else 1


def _note(rounds: dict[str, list[dict[str, Any]]], name: str, figures: dict[str, Any]) -> None:
    rounds.setdefault(name, []).append(figures)


def prompt_of(seed: int, n_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 40_000) for _ in range(n_tokens)]


def returning(engine: Worker, n_tokens: int, seed: int) -> dict[str, Any]:
    """The session, another one, the session again."""
    _, [first] = engine.client.generate([prompt_of(seed, n_tokens)], N_OUT)
    engine.client.generate([prompt_of(1000 + seed, n_tokens)], N_OUT)
    figures = again(engine, n_tokens, seed)
    return figures | {"same": figures["tokens"] == first.tokens}


def again(engine: Worker, n_tokens: int, seed: int) -> dict[str, Any]:
    _, [reply] = engine.client.generate([prompt_of(seed, n_tokens)], N_OUT)
    return {"ttft_s": reply.ttft_s, "cached": reply.cached, "tokens": reply.tokens, "same": True}


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    base = median(each["ttft_s"] for each in rounds["recomputed"])
    rows = {}
    for name, found in rounds.items():
        ttft_s = median(each["ttft_s"] for each in found)
        rows[name] = {
            "ttft_s": round(ttft_s, 4),
            "all_s": [round(each["ttft_s"], 4) for each in found],
            "cached": found[0]["cached"],
            "speedup": round(base / ttft_s, 2),
        }
    same = all(each["same"] for found in rounds.values() for each in found)
    by_round = zip(*([tuple(each["tokens"]) for each in found] for found in rounds.values()))
    return {"rows": rows, "identical": same and all(len(set(tokens)) == 1 for tokens in by_round)}


def table(figures: dict[str, Any]) -> str:
    lines = ["| returning session | TTFT | cached tokens | faster |", "|---|---|---|---|"]
    for name, row in figures["rows"].items():
        lines.append(f"| {name} | {row['ttft_s']:.3f} s | {row['cached']:,} | {row['speedup']:.1f}× |")
    return "\n".join(lines)


def _parse() -> argparse.Namespace:
    import os

    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("--tokens", type=int, default=3400)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--model", type=Path, help="default: the default model, which must have been pulled")
    parser.add_argument("--home", type=Path, default=home_dir(os.environ))
    parser.add_argument("--folder", type=Path, help="on the drive to use; default: the folder for temporary files")
    parser.add_argument("--log", type=Path, default=Path("/tmp/emberline-kv-tiers.log"))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
