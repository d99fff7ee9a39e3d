"""Does the simulator's model of Dynamo's router reach the hits of the real one? `python -m benchmarks.dynamo_replay`.

The real router runs in Dynamo's own offline replay: its Rust code over its mocker, in virtual time. The simulator gets
the same sessions at the same times, and workers whose steps take as long as the mocker's, which were measured with
single requests and batches. Sub-agents are left out of both, because the replay's sessions are sequential.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from emberline.simulator.baselines import DynamoKnobs
from emberline.simulator.coefficients import Coefficients, FixedTokenBudget
from emberline.simulator.experiment import SimulationConfig
from emberline.simulator.simulation import simulate
from emberline.simulator.trace import SessionStart, TrafficTrace, session_starts
from emberline.simulator.trace_sources import open_trace


class MockerCoefficients(Coefficients, frozen=True, kw_only=True):
    """Step times of the mocker of ai-dynamo 1.6.1, its polynomial timing model.

    A step's prompt tokens take one polynomial together. Its decoding takes one of the share of the KV cache that the
    decoding sequences fill, so the same batch is slower on a worker with less memory. Without either the other takes
    no time. Fitted to single requests and batches of its own replay, which it matches to 0.01 ms.
    """

    def decode_s(self, n_decoding: int, context: int) -> float:
        filled = context / self.kv_tokens
        return 1e-3 * (5.74 + 54.01 * filled - 25.74 * filled**2) if n_decoding else 0.0

    def batch_s(self, n_decoding: int, context: int, chunks: Sequence[tuple[int, int]]) -> float:
        n_tokens = sum(n for n, _ in chunks)
        prefill_s = 1e-3 * (16.5 + 1.518344e-2 * n_tokens + 4.209989e-7 * n_tokens**2) if n_tokens else 0.0
        return prefill_s + self.decode_s(n_decoding, context)


def mocker(kv_tokens: int) -> MockerCoefficients:
    """A worker of the mocker with room for so many tokens."""
    return MockerCoefficients(
        name="dynamo-mocker",
        source="dynamo.replay of ai-dynamo 1.6.1, polynomial timing model",
        step_s=0.00574,
        row_s=0.0,
        context_s=0.035 / kv_tokens,  # how fast a step's time grows: the polynomial's slope where 37 % is filled
        token_s=1.995e-5,
        pair_s=0.0,
        kv_tokens=kv_tokens,
        kv_bytes=131_072,
        paced=False,
    )


WARMUP_S = 300.0
_REPLAY = """
import json, os, sys
os.environ["DYN_LOG"] = "error"
from dynamo.llm import KvRouterConfig
from dynamo.replay import run_trace_replay
trace, block, workers, kv_blocks, until_ms, scale = sys.argv[1], *map(float, sys.argv[2:])
engine = {"num_gpu_blocks": int(kv_blocks), "block_size": int(block), "max_num_batched_tokens": 8192}
found = run_trace_replay([trace], num_workers=int(workers), router_mode="kv_router", trace_block_size=int(block),
    extra_engine_args={"engine": engine}, max_sim_time_ms=until_ms, capture_per_request=True,
    router_config=KvRouterConfig(prefill_load_scale=scale))
names = ("arrival_time_ms", "input_length", "reused_input_tokens", "ttft_ms")
print(json.dumps([[each[name] for name in names] for each in found.per_request]))
"""


def without_sub_agents(trace: TrafficTrace) -> TrafficTrace:
    """The same sessions, in which every turn waits for the one before it."""
    sessions = []
    for session in trace.sessions:
        kept = [place for place, turn in enumerate(session.turns) if not turn.is_sub_agent]
        turns, times_s = tuple(session.turns[at] for at in kept), tuple(session.times_s[at] for at in kept)
        sessions.append(replace(session, turns=turns, times_s=times_s))
    return replace(trace, sessions=sessions)


def rows(starts: Sequence[SessionStart], block_tokens: int) -> Iterator[dict[str, Any]]:
    """The turns that are sent, in the format of Mooncake's traces with sessions."""
    for number, start in enumerate(starts):
        for place, turn in enumerate(start.session.turns[start.turn :]):
            kind, n_common = start.session.common
            blocks = [
                (segment + (kind << 12 if segment < n_common else start.base)) << 16 | block
                for segment, length in zip(turn.path, turn.lengths)
                for block in range(length)
            ]
            n_prompt = min(turn.n_prompt, len(blocks) * block_tokens)
            row: dict[str, Any] = {"session_id": f"s{number}", "input_length": n_prompt, "output_length": turn.n_output}
            row["hash_ids"] = blocks[: -(-n_prompt // block_tokens)]
            row |= {"delay": 1e3 * turn.wait_s} if place else {"timestamp": 1e3 * max(0.0, start.at_s)}
            yield row


def real(python: Path, trace: TrafficTrace, config: SimulationConfig, scale: float) -> dict[str, Any]:
    """Figures of the real router."""
    starts = session_starts(trace, config.load, config.end_s, Random(config.seed))
    starts.sort(key=lambda start: start.has_ended)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows(starts, trace.block_tokens))
        file.flush()
        kv_blocks = config.model.kv_tokens // trace.block_tokens
        given = (trace.block_tokens, config.workers, kv_blocks, 1e3 * (config.end_s + config.drain_s), scale)
        command = [str(python), "-c", _REPLAY, file.name, *map(str, given)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    measured = [
        (n_prompt, n_cached or 0, ttft_ms)
        for at_ms, n_prompt, n_cached, ttft_ms in json.loads(output.splitlines()[-1])
        if config.measured_from_s <= at_ms / 1e3 < config.end_s and ttft_ms is not None
    ]
    ttft_s = sorted(ttft_ms / 1e3 for *_, ttft_ms in measured)
    return {
        "requests": len(measured),
        "hit_ratio": sum(n for _, n, _ in measured) / sum(n for n, _, _ in measured),
        "ttft_p50_s": ttft_s[len(ttft_s) // 2],
        "ttft_p90_s": ttft_s[9 * len(ttft_s) // 10],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamo_replay", description=__doc__)
    parser.add_argument("--dynamo", type=Path, required=True, help="python of an environment with ai-dynamo 1.6.1")
    parser.add_argument("--trace", default="agents", help="coding sessions: a file, or agents (default)")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.01, 0.02, 0.03], help="session starts per second")
    parser.add_argument("--kv-tokens", type=int, nargs="+", default=[891_000], help="of a worker")
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0], help="prefill_load_scale (Dynamo's: 1)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    trace = without_sub_agents(open_trace(options.trace, options.seed, mocker(1).context_len))
    for kv_tokens in options.kv_tokens:
        model = mocker(kv_tokens)
        for load in options.loads:
            for scale in options.scales:
                config = SimulationConfig(
                    model=model,
                    load=load,
                    policy="dynamo",
                    knobs=DynamoKnobs(overlap_weight=scale),
                    prefill_policy=FixedTokenBudget(model.token_budget),
                    retention="lru",
                    warmup_s=WARMUP_S,
                    measured_s=1000.0,
                    seed=options.seed,
                )
                modelled = simulate(trace, config).figures()
                found = real(options.dynamo, trace, config, scale)
                figures = {name: [round(found[name], 3), round(modelled[name], 3)] for name in found}
                ideal = round(modelled["ideal_hit_ratio"], 3)
                print(
                    json.dumps({"kv": kv_tokens, "load": load, "scale": scale, "at_most": ideal, **figures}), flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
