"""Traces: reading both file formats, and the shape of synthetic traffic."""

import gzip
import json
from itertools import takewhile
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.errors import BadInput
from emberline.simulator.trace import DistinctBlocks, SegmentIndex, TraceTurn, TrafficTrace, run_lengths
from emberline.simulator.trace_sources import open_trace, synthetic_agents, synthetic_chats

CHATS = [
    {"timestamp": 0, "input_length": 1500, "output_length": 10, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 2000, "output_length": 10, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 2500, "input_length": 600, "output_length": 0, "hash_ids": [0, 9]},
    {"timestamp": 3000, "input_length": 9000, "output_length": 10, "hash_ids": list(range(20, 38))},
]
AGENT = {
    "id": "a",
    "block_size": 64,
    "tool_tokens": 128,
    "system_tokens": 70,
    "requests": [
        {"t": 0.0, "type": "n", "in": 640, "out": 20, "h": [[1, 10]], "think_time": 0.0, "api_time": 2.0},
        {"t": 3.0, "type": "subagent", "requests": [{"t": 0.0, "in": 128, "out": 5, "h": [[50, 2]], "api_time": 1.0}]},
        {"t": 12.0, "type": "n", "in": 768, "out": 30, "h": [[1, 9], [11, 3]], "think_time": 10.0, "api_time": 2.0},
        {"t": 99.0, "type": "n", "in": 99_000, "out": 30, "h": [[1, 9], [11, 1538]], "think_time": 10.0},
    ],
}


def write(path: Path, rows: list[dict[str, object]]) -> str:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def blocks(turn: TraceTurn) -> int:
    return sum(turn.lengths)


def test_run_lengths() -> None:
    assert run_lengths([4, 5, 6, 9, 2, 3]) == [(4, 3), (9, 1), (2, 2)]
    assert run_lengths([]) == []


def test_a_block_that_a_prompt_names_again_is_another_one() -> None:
    blocks = DistinctBlocks(100)
    assert blocks.of([(1, 5), (2, 2)]) == [(1, 5), (100, 2)]
    assert blocks.of([(1, 5), (2, 2), (20, 3), (2, 1)]) == [(1, 5), (100, 2), (20, 3), (102, 1)]
    assert blocks.of([(1, 4), (2, 1)]) == [(1, 4), (103, 1)], "it follows other blocks"
    assert blocks.of([(7, 1), (5, 2)]) == [(7, 1), (5, 2)]


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=5), min_size=2, max_size=2))
def test_prompts_begin_alike_as_long_as_they_did(prompts: list[list[tuple[int, int]]]) -> None:
    blocks = DistinctBlocks(1000)
    before = [[first + n for first, count in runs for n in range(count)] for runs in prompts]
    after = [[first + n for first, count in blocks.of(runs) for n in range(count)] for runs in prompts]
    assert [len(ids) for ids in before] == [len(set(ids)) for ids in after]
    n_alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both))) for both in (before, after)]
    assert n_alike[0] == n_alike[1]


def test_segments_divide_where_prompts_diverge() -> None:
    prompts = [[(0, 10)], [(0, 6), (20, 3)], [(0, 10), (30, 2)]]
    segments = SegmentIndex(prompts)
    paths = [segments.path(runs) for runs in prompts]
    assert [lengths for _, lengths in paths] == [(6, 4), (6, 3), (6, 4, 2)]
    assert paths[0][0] == paths[2][0][:2]
    assert paths[0][0][0] == paths[1][0][0]


def test_chats_keep_arrivals_and_share_blocks(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "chat.jsonl.gz", CHATS), 1, 8192)
    assert (trace.shared, trace.block_tokens, trace.n_turns, trace.left_out) == (True, 512, 3, 1)
    first, second, third = (session.turns[0] for session in trace.sessions)
    assert [session.start_s for session in trace.sessions] == [0.0, 1.0, 2.5]
    assert [blocks(turn) for turn in (first, second, third)] == [3, 4, 2]
    assert first.path[:2] == second.path[:2]
    assert first.path[2] != second.path[2]
    assert third.n_output == 1  # a reply has a token at least


def test_azures_requests_share_nothing(tmp_path: Path) -> None:
    rows = "2023-11-16 18:17:03.9799600,1500,10\n2023-11-16 18:17:05.4799600,600,8\n2023-11-16 18:17:06.0000000,9000,1"
    path = tmp_path / "azure.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    trace = open_trace(str(path), 1, 8192)
    assert (trace.name, trace.shared, trace.n_turns, trace.left_out) == ("azure", True, 2, 1)
    first, second = (session.turns[0] for session in trace.sessions)
    assert [round(session.start_s, 3) for session in trace.sessions] == [0.0, 1.5]
    assert (blocks(first), first.n_output, blocks(second), second.n_output) == (3, 10, 2, 8)
    assert not {*first.path} & {*second.path}
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,10")
    with pytest.raises(BadInput, match="line 2"):
        open_trace(str(path), 1, 8192)


def test_agents_share_tools_and_system_prompt_and_end_at_the_context_limit(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "agents.jsonl.gz", [AGENT, {**AGENT, "id": "b"}]), 1, 8192)
    assert (trace.shared, trace.block_tokens, len(trace.sessions), trace.left_out) == (False, 64, 2, 2)
    session = trace.sessions[0]
    assert session.common == (0, 1)
    assert [turn.is_sub_agent for turn in session.turns] == [False, True, False]
    assert session.turns[0].lengths[0] == (128 + 70) // 64
    assert [turn.wait_s for turn in session.turns] == [0.0, 1.0, 10.0]
    assert session.times_s == (0.0, 3.0, 12.0)


def test_invalid_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="agents, chats"):
        open_trace(str(tmp_path / "none"), 1, 8192)
    with pytest.raises(BadInput, match="neither"):
        open_trace(write(tmp_path / "a.jsonl.gz", [{"a": 1}]), 1, 8192)
    with pytest.raises(BadInput, match="no request that fits"):
        open_trace(write(tmp_path / "b.jsonl.gz", CHATS), 1, 500)
    with pytest.raises(BadInput, match="512"):
        open_trace(write(tmp_path / "c.jsonl.gz", [{**CHATS[0], "hash_ids": [1]}]), 1, 8192)
    (tmp_path / "d.jsonl.gz").write_bytes(b"{}")
    with pytest.raises(BadInput, match="gzip"):
        open_trace(str(tmp_path / "d.jsonl.gz"), 1, 8192)


def ideal(turns: list[TraceTurn]) -> float:
    known: set[int] = set()
    n_known = 0
    for turn in turns:
        for segment, length in zip(turn.path, turn.lengths):
            if segment not in known:
                break
            n_known += length
        known.update(turn.path)
    return n_known / sum(map(blocks, turns))


def turns_of(trace: TrafficTrace) -> list[TraceTurn]:
    return [turn for session in trace.sessions for turn in session.turns]


def test_synthetic_agents() -> None:
    trace = synthetic_agents(7, 262_144, n_sessions=60)
    turns = turns_of(trace)
    assert 60_000 < median(turn.n_prompt for turn in turns) < 150_000
    assert 150 < median(turn.n_output for turn in turns) < 300
    assert 25 < median(len(session.turns) for session in trace.sessions) < 65
    assert 5 < median(turn.wait_s for turn in turns) < 15
    assert 0.9 < sum(ideal(list(session.turns)) for session in trace.sessions) / len(trace.sessions) < 0.99


def test_synthetic_chats() -> None:
    trace = synthetic_chats(7, 131_072)
    turns = turns_of(trace)
    assert 5_000 < median(turn.n_prompt for turn in turns) < 9_000
    assert 250 < median(turn.n_output for turn in turns) < 400
    assert 0.3 < ideal(turns) < 0.45
    assert len(trace.sessions) / max(session.start_s for session in trace.sessions) == pytest.approx(3.4, rel=0.05)
