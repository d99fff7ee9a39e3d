"""The workloads, as prompts and what is read off the answers. The same prompts' shapes and formulas as the peer's."""

import itertools
import random
import time
from collections import Counter
from typing import Any

from benchmarks.gpu.engine import Answer, Client, Worker

BATCHES = (1, 8, 32, 64, 128, 256)


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


def steady_tok_s(answers: list[Answer]) -> float:
    """Tokens a second while all of them run: between the last first token and the first last one."""
    begin = max(answer.times_s[0] for answer in answers)
    end = min(answer.times_s[-1] for answer in answers)
    times = sorted({moment for answer in answers for moment in answer.times_s if begin <= moment <= end})
    return len(answers) * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 8 else 0.0


def decode(client: Client, prompts: Prompts, batch: int, temperature: float = 0.0) -> dict[str, float]:
    """`tok_s`: whole minus first, as the peer is measured. `steady_tok_s`: the pace while the full batch decodes.

    For the second the prompts are in the cache, so that all replies begin together.
    """
    n_out = 129
    for _ in range(2 if batch == 1 else 1):
        first_s, _ = client.generate(prompts.many(batch, 512), 1, temperature)
        asked = prompts.many(batch, 512)
        whole_s, _ = client.generate(asked, n_out, temperature)
    _, answers = client.generate(asked, n_out, temperature)
    return {"tok_s": batch * (n_out - 1) / (whole_s - first_s), "steady_tok_s": steady_tok_s(answers)}


def prefill(client: Client, prompts: Prompts, length: int) -> float:
    return min(client.generate([prompts.of(length)], 1)[0] for _ in range(3))


def throughput(client: Client, prompts: Prompts, n: int = 512) -> dict[str, float]:
    seconds, answers = client.generate(prompts.many(n, 1024), 256)
    return {"s": seconds, "out_tok_s": sum(len(answer.tokens) for answer in answers) / seconds}


def agentic(client: Client, prompts: Prompts, n: int = 32, turns: int = 8) -> dict[str, float]:
    system = prompts.of(4096)
    histories = [system + prompts.of(256) for _ in range(n)]
    begin = time.perf_counter()
    cached = Counter[str]()
    for _ in range(turns):
        _, answers = client.generate(histories, 128)
        cached["cached"] += sum(answer.cached for answer in answers)
        cached["prompt"] += sum(answer.n_prompt for answer in answers)
        histories = [h + answer.tokens + prompts.of(384) for h, answer in zip(histories, answers)]
    return {"s": time.perf_counter() - begin, "cached_share": cached["cached"] / cached["prompt"]}


def mixed(client: Client, prompts: Prompts, every_s: float, length: int = 8192, n_out: int = 1200) -> dict[str, Any]:
    """The pace of 32 streams while long prompts arrive."""
    streams = client.submit(prompts.many(32, 512), n_out)
    client.run(until_s=time.perf_counter() + 0.5)
    arrivals: list[Answer] = []
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


def cpu_per_step(worker: Worker, prompts: Prompts, batch: int = 64, n_out: int = 400) -> float:
    """Seconds of the engine process on a core for each decode step."""
    client = worker.client
    answers = client.submit(prompts.many(batch, 512), n_out)
    while min(len(answer.times_s) for answer in answers) < 20:
        client.run(until_s=time.perf_counter() + 0.02)
    steps, spent_s = client.load.steps, worker.cpu_s()
    client.run()
    return (worker.cpu_s() - spent_s) / (client.load.steps - steps)


def whole_context(client: Client, prompts: Prompts, context_len: int, n_out: int = 16) -> float:
    """A prompt that fills the context but for its reply."""
    return client.generate([prompts.of(context_len - n_out)], n_out)[0]


def same_in_any_batch(client: Client, prompts: Prompts, n: int = 12, n_out: int = 48) -> bool:
    """Whether replies are the same alone, together, and from the cache. The worker must be deterministic."""
    asked = [prompts.of(40 + 37 * i) for i in range(n)]
    alone = [client.generate([prompt], n_out)[1][0].tokens for prompt in asked]
    together = [answer.tokens for answer in client.generate(asked, n_out)[1]]
    return alone == together
