"""Fetches of a rank group under memory pressure: `python -m benchmarks.rank_fetches [--ranks 1 2] [--requests 400]`.

Sessions with a common beginning take turns on an engine whose host tier holds a part of them. The ranks are in this
process, with their real tiers, over a fake model. A fetch promises what rank 0's tier holds. If another rank has
evicted its slice of a block, that block and those after it are computed again. The trace is seeded, and everything that
was saved or fetched has arrived before the next request.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from benchmarks.report import markdown
from emberline.protocol.request import EngineRequest
from tests.engine.fakes import VOCAB, request
from tests.engine.ranks.rank_engine import RankEngine

DEVICE_BLOCKS, HOST_BLOCKS = 40, 150
N_SESSIONS, SHARED_TOKENS, MAX_TOKENS = 30, 64, 380
RECENT = 0.5  # share of turns of one of the last RECENT_SESSIONS sessions
RECENT_SESSIONS = 5
LIMIT_S = 60.0  # for one request


def trace(n_requests: int, seed: int) -> Iterator[EngineRequest]:
    """Turns of sessions: some return soon, others after many others. A session that is full begins anew."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(SHARED_TOKENS)]
    histories = [list(shared) for _ in range(N_SESSIONS)]
    recent: list[int] = []
    for n in range(n_requests):
        is_recent = recent and rng.random() < RECENT
        session = rng.choice(recent[-RECENT_SESSIONS:]) if is_recent else rng.randrange(N_SESSIONS)
        recent.append(session)
        if len(histories[session]) > MAX_TOKENS - 80:
            histories[session] = list(shared)
        histories[session] += [rng.randrange(VOCAB) for _ in range(rng.randrange(16, 80))]
        yield request(f"r{n}", histories[session], session=f"s{session}", max_tokens=2)


def run(n_ranks: int, n_requests: int, seed: int) -> dict[str, float]:
    """Blocks that fetches promised, and that were computed again, with so many ranks."""
    with ExitStack() as closing:
        engine = RankEngine(n_ranks, DEVICE_BLOCKS, HOST_BLOCKS, closing)
        book = engine.book
        assert book is not None
        for n, wanted in enumerate(trace(n_requests, seed)):
            now_s, until_s = float(n), time.monotonic() + LIMIT_S
            engine.loop.submit(wanted, now_s)
            while engine.loop.busy or book.open:
                if time.monotonic() > until_s:
                    raise TimeoutError(f"request {n} never ends")
                engine.pump()
                engine.loop.step(now_s)
                time.sleep(0.0001)  # for the threads of the tiers
            engine.flush()
        (host,) = engine.managers[0].all_tiers
        recomputed = int(engine.recomputed["host"])
        return {
            "ranks": n_ranks,
            "requests": n_requests,
            "evicted_blocks": host.stats().evicted,
            "promised_blocks": book.n_wanted,
            "recomputed_blocks": recomputed,
            "recomputed_share": round(recomputed / max(1, book.n_wanted), 4),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_fetches", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], choices=[1, 2, 3, 4])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = [run(n_ranks, args.requests, args.seed) for n_ranks in args.ranks]
    print(json.dumps(rows) if args.json else markdown(list(rows[0]), [list(map(str, row.values())) for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
