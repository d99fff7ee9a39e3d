"""`emberline bench`: TTFT and throughput of a server with one stream, then eight at once, on random prompts.

A quick measurement of one machine; `benchmarks/` compares Emberline with other engines.
"""

import argparse
import random
import statistics
import threading
import time
from typing import Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming
from emberline.cli.server_target import served_names, server
from emberline.protocol.errors import EmberlineError, Unavailable
from emberline.server.address import ServerAddress

WORDS = (
    *("time", "year", "people", "way", "day", "thing", "life", "child", "world", "school", "state", "family"),
    *("group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program"),
    *("question", "work", "number", "night", "point", "home", "water", "room", "area", "money", "story", "book"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name, path or hf:org/repo (default: the server's)")
    parser.add_argument("--input-words", type=int, default=512, metavar="N", help="words per prompt (default 512)")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="N", help="tokens per answer (default 64)")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    required = common.names_server(args, config)
    served = served_names(config, required=required)
    n_words, n_tokens = args.input_words, args.output_tokens
    with server(config, args.model, served, required=required) as (address, model):
        rows = [measure(address, model, n, n_words, n_tokens) for n in (1, 8)]
    if args.json:
        common.print_json({"model": model, "input_words": n_words, "output_tokens": n_tokens, "runs": rows})
        return 0
    print(f"{model}, {rows[0]['prompt_tokens']} tokens in, {n_tokens} out")
    print(f"{'streams':>8} {'TTFT':>14} {'tokens/s each':>14} {'tokens/s total':>16}")
    for row in rows:
        ttft = f"{row['first_token_ms']:.0f} ms"
        print(f"{row['streams']:>8} {ttft:>14} {row['tokens_per_s_each']:>14.1f} {row['tokens_per_s']:>16.1f}")
    return 0


def measure(address: ServerAddress, model: str, n_streams: int, n_words: int, n_tokens: int) -> dict[str, Any]:
    """Medians over the streams; `tokens_per_s` is the throughput of all of them, prefill included."""
    timings = [ChatTiming() for _ in range(n_streams)]
    failures: list[EmberlineError] = []
    each = (address, model, n_words, n_tokens, failures)
    threads = [threading.Thread(target=_stream, args=(*each, timing), daemon=True) for timing in timings]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total_s = time.perf_counter() - start_s
    if failures:
        raise failures[0]
    if not all(timing.output_tokens for timing in timings):
        raise Unavailable("some streams were empty; the log of `emberline serve` says why")
    return {
        "streams": n_streams,
        "prompt_tokens": round(statistics.median(timing.prompt_tokens for timing in timings)),
        "first_token_ms": round(1e3 * statistics.median(timing.ttft_s for timing in timings), 1),
        "tokens_per_s_each": round(statistics.median(timing.tokens_per_s for timing in timings), 1),
        "tokens_per_s": round(sum(timing.output_tokens for timing in timings) / total_s, 1),
        "total_s": round(total_s, 3),
    }


def _stream(
    address: ServerAddress, model: str, n_words: int, n_tokens: int, failures: list[EmberlineError], timing: ChatTiming
) -> None:
    text = " ".join(random.choices(WORDS, k=n_words))
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": n_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    try:
        for _ in client.chat(address, body, timing):
            pass
    except EmberlineError as error:
        failures.append(error)
