"""Replays a small trace on real workers and in the simulator, and compares their TTFT."""

import asyncio
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.client import Reply
from benchmarks.prompts import Prompts
from benchmarks.workloads import Target, ask
from emberline.simulator.coefficients import Coefficients, FixedTokenBudget
from emberline.simulator.experiment import SimulationConfig, percentile
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import TraceSession, TraceTurn, TrafficTrace

TOKEN_BUDGET = 512  # of a worker's step
SESSIONS, TURNS = 12, 3
SYSTEM, TURN_TOKENS, REPLY = 200, (100, 500), 24
APART_S, THINK_S = 4.0, 2.0  # between sessions, and of thinking, on average
TOLERANCE = 0.2


@dataclass(slots=True)
class Asked:
    at_s: float  # since the replay's start
    wait_s: float  # since the reply before
    reply: Reply


async def compare(target: Target, prompts: Prompts, model: Coefficients, seed: str) -> dict[str, Any]:
    rng = Random(seed)
    system = prompts.system(SYSTEM)
    await ask(target, [system, prompts.user(50, [system])], 1)
    starts = [0.0]
    while len(starts) < SESSIONS:
        starts.append(starts[-1] + rng.expovariate(1 / APART_S))
    began = time.perf_counter()

    async def session(number: int) -> list[Asked]:
        draw = Random(f"{seed} {number}")
        messages, asked, wait_s = [system], [], starts[number]
        for _ in range(TURNS):
            messages.append(prompts.user(draw.randint(*TURN_TOKENS), messages))
            await asyncio.sleep(wait_s if asked else max(0.0, began + starts[number] - time.perf_counter()))
            at_s = time.perf_counter() - began
            reply = await ask(target, messages, REPLY, f"check-{number}")
            asked.append(Asked(at_s, wait_s, reply))
            messages.append({"role": "assistant", "content": reply.text})
            wait_s = draw.expovariate(1 / THINK_S)
        return asked

    sessions = await asyncio.gather(*(session(number) for number in range(SESSIONS)))
    real = sorted(asked.reply.ttft_s for asked_all in sessions for asked in asked_all)
    plan = SimulationConfig(
        model=model,
        load=1.0,
        workers=2,
        prefill_policy=FixedTokenBudget(TOKEN_BUDGET),
        warmup_s=0.0,
        measured_s=600.0,
        session_affinity=True,
        key_tokens=16,
    )
    outcome = simulate(_trace(sessions), plan)
    simulated = sorted(wait_s + model.request_s for wait_s in outcome.ttft_s())
    return _report(real, simulated, sessions, outcome.hit_ratio)


def _trace(sessions: list[list[Asked]]) -> TrafficTrace:
    """The same sessions: prompts as long as they were, each behind all of the one before and its reply."""
    found = []
    for number, asked in enumerate(sessions):
        turns, path, lengths = [], [0], [SYSTEM // 16]
        for place, one in enumerate(asked):
            n, n_output = one.reply.prompt_tokens, one.reply.output_tokens
            segment = 1 + 2 * (number * TURNS + place)
            path, full = [*path, segment], n // 16 - sum(lengths)
            reply = (segment + 1, (n + n_output - 1) // 16 - n // 16)  # the last token's KV is never computed
            wait_s = one.wait_s if place else 0.0
            turns.append(TraceTurn(tuple(path), (*lengths, full), n, n_output, wait_s, reply))
            path, lengths = [*path, segment + 1], [*lengths, full, reply[1]]
        found.append(TraceSession(tuple(turns), asked[0].at_s, times_s=tuple(one.at_s for one in asked)))
    return TrafficTrace("replay", 16, found, 1 + 2 * SESSIONS * TURNS, True)


def _report(real: list[float], simulated: list[float], sessions: list[list[Asked]], hit: float) -> dict[str, Any]:
    n_prompt = sum(one.reply.prompt_tokens for asked in sessions for one in asked)
    n_cached = sum(one.reply.cached_tokens for asked in sessions for one in asked)
    rows = {}
    for name, of in (
        ("mean", lambda v: sum(v) / len(v)),
        ("p50", lambda v: percentile(v, 50)),
        ("p90", lambda v: percentile(v, 90)),
    ):
        rows[name] = {"real_s": round(of(real), 4), "simulated_s": round(of(simulated), 4)}
        rows[name]["off"] = round(of(simulated) / of(real) - 1, 3)
    return {
        "requests": len(real),
        "ttft": rows,
        "hit_ratio": {"real": round(n_cached / n_prompt, 3), "simulated": round(hit, 3)},
        "within": all(abs(row["off"]) <= TOLERANCE for row in rows.values()),
    }
