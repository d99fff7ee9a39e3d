"""The workloads and their figures, with the same prompt shapes and formulas as the peer's."""

import itertools
import random
import time
from collections import Counter
from typing import Any

import msgspec

from benchmarks.gpu.engine import Client, Reply, Worker
from emberline.protocol.grammar import Chars, Grammar, Repeat

BATCHES = (1, 8, 32, 64, 128, 256)
LETTERS = msgspec.msgpack.encode(Grammar((Repeat(Chars(((97, 122),))),)))  # a grammar: any number of small letters


class Prompts:
    def __init__(self, seed: int, vocab_size: int = 128256) -> None:
        self._random = random.Random(seed)
        self._low, self._high = min(1000, vocab_size // 4), min(120_000, vocab_size)

    def of(self, n: int) -> list[int]:
        return [self._random.randrange(self._low, self._high) for _ in range(n)]

    def many(self, n: int, length: int) -> list[list[int]]:
        return [self.of(length) for _ in range(n)]


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def steady_tok_s(replies: list[Reply]) -> float:
    """Throughput while all requests run: from the last one's first token to the first one's last token."""
    begin = max(reply.times_s[0] for reply in replies)
    end = min(reply.times_s[-1] for reply in replies)
    times = sorted({moment for reply in replies for moment in reply.times_s if begin <= moment <= end})
    return len(replies) * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 8 else 0.0


def decode(client: Client, prompts: Prompts, batch: int, temperature: float = 0.0, **more: Any) -> dict[str, float]:
    """`tok_s`: total time minus that of one token, as for the peer. `steady_tok_s`: while the full batch decodes.

    For the latter the prompts are cached, so that all replies begin together. more: as of `Client.submit`.
    """
    n_out = 129
    for _ in range(2 if batch == 1 else 1):
        first_s, _ = client.generate(prompts.many(batch, 512), 1, temperature, **more)
        requests = prompts.many(batch, 512)
        whole_s, _ = client.generate(requests, n_out, temperature, **more)
    _, replies = client.generate(requests, n_out, temperature, **more)
    return {"tok_s": batch * (n_out - 1) / (whole_s - first_s), "steady_tok_s": steady_tok_s(replies)}


def prefill(client: Client, prompts: Prompts, length: int) -> float:
    return min(client.generate([prompts.of(length)], 1)[0] for _ in range(3))


def throughput(client: Client, prompts: Prompts, n: int = 512) -> dict[str, float]:
    seconds, replies = client.generate(prompts.many(n, 1024), 256)
    return {"s": seconds, "out_tok_s": sum(len(reply.tokens) for reply in replies) / seconds}


def agentic(client: Client, prompts: Prompts, n: int = 32, turns: int = 8) -> dict[str, float]:
    system = prompts.of(4096)
    histories = [system + prompts.of(256) for _ in range(n)]
    begin = time.perf_counter()
    cached = Counter[str]()
    for _ in range(turns):
        _, replies = client.generate(histories, 128)
        cached["cached"] += sum(reply.cached for reply in replies)
        cached["prompt"] += sum(reply.n_prompt for reply in replies)
        histories = [h + reply.tokens + prompts.of(384) for h, reply in zip(histories, replies)]
    return {"s": time.perf_counter() - begin, "cached_share": cached["cached"] / cached["prompt"]}


def mixed(client: Client, prompts: Prompts, every_s: float, length: int = 8192, n_out: int = 1200) -> dict[str, Any]:
    """Inter-token latency of 32 streams while long prompts arrive, and the prompts' TTFT."""
    streams = client.submit(prompts.many(32, 512), n_out)
    client.run(until_s=time.perf_counter() + 0.5)
    arrivals: list[Reply] = []
    while any(stream.finish is None for stream in streams):
        arrivals += client.submit([prompts.of(length)], 16)
        client.run(until_s=time.perf_counter() + every_s)
    client.run()
    gaps = [after - before for s in streams for before, after in itertools.pairwise(s.times_s)]
    waits = [arrival.ttft_s for arrival in arrivals]
    return {
        "itl_ms": {f"p{int(q * 100)}": 1e3 * quantile(gaps, q) for q in (0.5, 0.9, 0.99)},
        "itl_max_ms": 1e3 * max(gaps),
        "ttft_s": {f"p{int(q * 100)}": quantile(waits, q) for q in (0.5, 0.9)},
        "prompts": len(arrivals),
    }


def first_burst(client: Client, prompts: Prompts, n: int, length: int = 40, n_out: int = 32) -> dict[str, float]:
    """So many requests at once: seconds for all, the longest TTFT, and the longest time without any token."""
    seconds, replies = client.generate(prompts.many(n, length), n_out, temperature=0.7)
    moments = sorted({replies[0].sent_s, *(moment for reply in replies for moment in reply.times_s)})
    return {
        "s": seconds,
        "ttft_max_s": max(reply.ttft_s for reply in replies),
        "longest_pause_s": max(after - before for before, after in itertools.pairwise(moments)),
    }


def burst(client: Client, prompts: Prompts, n: int = 256, length: int = 512, n_out: int = 256) -> dict[str, Any]:
    """Streams that begin at once on a prepared engine: throughput, gaps between tokens, the last first token."""
    seconds, replies = client.generate(prompts.many(n, length), n_out)
    gaps = [after - before for each in replies for before, after in itertools.pairwise(each.times_s)]
    waits = [reply.ttft_s for reply in replies]
    return {
        "tok_s": n * n_out / seconds,
        "itl_ms": {f"p{int(q * 100)}": 1e3 * quantile(gaps, q) for q in (0.5, 0.9, 0.99)},
        "itl_max_ms": 1e3 * max(gaps),
        "ttft_p50_s": quantile(waits, 0.5),
        "ttft_max_s": max(waits),
    }


def cpu_per_step(worker: Worker, prompts: Prompts, batch: int = 64, n_out: int = 400) -> float:
    """CPU seconds of the engine process per decode step."""
    client = worker.client
    replies = client.submit(prompts.many(batch, 512), n_out)
    while min(len(reply.times_s) for reply in replies) < 20:
        client.run(until_s=time.perf_counter() + 0.02)
    steps, spent_s = client.load.steps, worker.cpu_s()
    client.run()
    return (worker.cpu_s() - spent_s) / (client.load.steps - steps)


def whole_context(client: Client, prompts: Prompts, context_len: int, n_out: int = 16) -> float:
    """Seconds for a prompt that fills the context up to its reply."""
    return client.generate([prompts.of(context_len - n_out)], n_out)[0]


def same_in_any_batch(client: Client, prompts: Prompts, n: int = 160, concurrencies: tuple[int, ...] = (8, 64)) -> bool:
    """Whether replies are the same one at a time and many at a time. The worker must be deterministic.

    Prompts and replies have many lengths, so that batches shrink and grow to sizes between those of CUDA graphs.
    """
    requests = [(prompts.of(150 + i * 41 % 1250), 16 + i * 7 % 49) for i in range(n)]
    alone = closed_loop(client, requests, 1)
    return all(closed_loop(client, requests, concurrency) == alone for concurrency in concurrencies)


def closed_loop(client: Client, requests: list[tuple[list[int], int]], concurrency: int) -> list[list[int]]:
    """The tokens of all replies, with so many requests in flight; each request is a prompt and a reply length."""
    replies: list[Reply] = []
    for prompt, n_out in requests:
        while sum(not reply.finish for reply in replies) >= concurrency:
            client.run(time.perf_counter() + 0.002)
        replies += client.submit([prompt], n_out)
    client.run()
    failed = [reply.finish for reply in replies if reply.finish != "length"]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(replies)} requests ended with {failed[0]}, {concurrency} at a time")
    return [reply.tokens for reply in replies]
