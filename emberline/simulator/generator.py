"""Traffic of the traces' shapes, made up: so that everything runs without their files.

Medians and spreads are those of the originals (lengths, turns, think time, how much is shared); it is no substitute for
them where figures are stated.
"""

from math import exp, log
from random import Random

from emberline.simulator import claude_code_trace as claude_code
from emberline.simulator import mooncake_trace as mooncake
from emberline.simulator.trace import Runs, Trace, runs_of

AGENT_KINDS = 12  # versions of tools and system prompt that are about at one time
AGENT_COMMON = 15_000  # tokens of them
CHAT_RATE = 3.4  # requests a second
CHAT_S = 3_600.0


def agents(seed: int, context_len: int, n_sessions: int = 300) -> Trace:
    """Coding agents: a long first prompt, some 45 turns of some hundred new tokens, thought, rare long pauses."""
    rng = Random(f"agents {seed}")
    trace = claude_code.build([_agent(rng) for _ in range(n_sessions)], context_len)
    trace.name = "agents"
    return trace


def chats(seed: int, context_len: int) -> Trace:
    """Chat: many short conversations whose prompts share one system prompt, a few long documents."""
    rng = Random(f"chats {seed}")
    rows = sorted(_chat_rows(rng), key=lambda row: row.timestamp)
    trace = mooncake.build(rows, context_len)
    trace.name = "chats"
    return trace


def _agent(rng: Random) -> claude_code.Recorded:
    size = 64
    kind = rng.randrange(AGENT_KINDS)
    prompt = int(AGENT_COMMON + _lognormal(rng, 25_000, 1.2))
    requests: list[claude_code.Request] = []
    runs: Runs = []
    next_id, t = 1, 0.0
    for _ in range(max(1, int(_lognormal(rng, 45, 0.9)))):
        n_blocks = -(-prompt // size)
        runs, next_id = _extended(runs, n_blocks, next_id)
        output = max(1, int(_lognormal(rng, 216, 1.1)))
        think_s = 0.0 if not requests else _think(rng)
        api_s = 2.0 + output / 60
        t += think_s
        requests.append(
            claude_code.Request(t=t, prompt=prompt, output=output, h=list(runs), think_time=think_s, api_time=api_s)
        )
        t += api_s
        prompt += max(32, int(_lognormal(rng, 653, 1.4)))
    return claude_code.Recorded(
        requests=requests, tool_tokens=AGENT_COMMON - 2_000 - 64 * kind, system_tokens=2_000 + 64 * kind
    )


def _think(rng: Random) -> float:
    return _lognormal(rng, 3_000, 1.0) if rng.random() < 0.02 else _lognormal(rng, 10, 1.4)


def _extended(runs: Runs, n_blocks: int, next_id: int) -> tuple[Runs, int]:
    """A prompt that goes on where the one before ended; its last block, which was not full, is another now."""
    kept = [list(run) for run in runs]
    if kept:
        kept[-1][1] -= 1
        if not kept[-1][1]:
            kept.pop()
    more = n_blocks - sum(n for _, n in kept)
    if kept and kept[-1][0] + kept[-1][1] == next_id:
        kept[-1][1] += more
    else:
        kept.append([next_id, more])
    return [(first, n) for first, n in kept], next_id + more


def _chat_rows(rng: Random) -> list[mooncake.Row]:
    rows: list[mooncake.Row] = []
    next_id, n_wanted = 1, int(CHAT_RATE * CHAT_S)
    while len(rows) < n_wanted:
        t = rng.uniform(0.0, CHAT_S)
        prompt, ids = int(_lognormal(rng, 6_000, 1.2)) + 64, [0]
        for _ in range(1 + int(rng.expovariate(1 / 0.9))):
            n_blocks = -(-prompt // mooncake.BLOCK_TOKENS)
            ids = ids[: max(1, len(ids) - 1)]
            fresh = range(next_id, next_id + n_blocks - len(ids))
            ids, next_id = [*ids, *fresh], fresh.stop
            output = max(1, int(_lognormal(rng, 300, 0.8)))
            if t < CHAT_S:
                rows.append(
                    mooncake.Row(timestamp=1e3 * t, input_length=prompt, output_length=output, hash_ids=ids[:n_blocks])
                )
            t += _lognormal(rng, 60, 1.0)
            prompt += output + int(_lognormal(rng, 800, 1.3))
    assert all(runs_of(row.hash_ids) for row in rows[:1])
    return rows[:n_wanted]


def _lognormal(rng: Random, middle: float, spread: float) -> float:
    return exp(rng.gauss(log(middle), spread))
