"""Coding-agent sessions: long prompts that grow turn by turn, think time between them, prefixes in blocks of 64 tokens.

Published at github.com/callanjfox/kv-cache-tester, traces/ (Apache-2.0). Block ids are local to a session; what tools
and the system prompt take at its beginning would be shared in life, so sessions with the same two counts share it here.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from emberline.simulator.file_lines import lines
from emberline.simulator.trace import Runs, Segments, Session, Trace, Turn


class Request(msgspec.Struct, rename={"prompt": "in", "output": "out"}):
    t: float  # s since the session's (or sub-agent's) start
    prompt: int = 0
    output: int = 0
    h: list[tuple[int, int]] = []
    think_time: float | None = None
    api_time: float | None = None
    requests: list["Request"] = []  # a sub-agent's


class Recorded(msgspec.Struct):
    requests: list[Request]
    block_size: int = 64
    tool_tokens: int = 0
    system_tokens: int = 0

    @property
    def own(self) -> list[Request]:
        return [request for request in self.requests if request.h]

    @property
    def agents(self) -> list[Request]:
        return [request for request in self.requests if request.requests]

    @property
    def prompts(self) -> Iterator[Runs]:
        for request in self.requests:
            yield from (inner.h for inner in request.requests) if request.requests else (request.h,)


def read(path: Path, context_len: int) -> Trace:
    decoder = msgspec.json.Decoder(Recorded)
    return build([decoder.decode(line) for line in lines(path)], context_len)


def build(recorded: Iterable[Recorded], context_len: int) -> Trace:
    """A session ends where it outgrows the context."""
    rows = [row for row in recorded if row.own]
    kinds: dict[tuple[int, int], int] = {}
    cuts: dict[int, set[int]] = {}  # of a kind's common part, counted from its beginning
    for row in rows:
        kind = kinds.setdefault((row.tool_tokens, row.system_tokens), len(kinds))
        start, n = _common(row)
        inside = (edge - start for runs in row.prompts for first, k in runs for edge in (first, first + k))
        cuts.setdefault(kind, set()).update(edge for edge in inside if 0 < edge <= n)
    sessions = []
    n_segments = left_out = 0
    for row in rows:
        kind = kinds[row.tool_tokens, row.system_tokens]
        start, n = _common(row)
        segments = Segments(row.prompts, {start, start + n, *(start + cut for cut in cuts[kind] if cut < n)})
        session, skipped = _session(row, segments, context_len, (kind, segments.number(start + n)) if n else (0, 0))
        left_out += skipped
        n_segments = max(n_segments, len(segments))
        if session.turns:
            sessions.append(session)
    block_tokens = rows[0].block_size if rows else 64
    return Trace("claude_code", block_tokens, sessions, n_segments, False, left_out)


def _common(row: Recorded) -> tuple[int, int]:
    """(first id, blocks) of what a session shares with others of its kind: blocks of its first prompt's first run."""
    first, n = row.own[0].h[0]
    lowest = min(start for runs in row.prompts for start, _ in runs)
    wanted = (row.tool_tokens + row.system_tokens) // row.block_size
    return (
        (first, min(n, wanted)) if first == lowest else (first, 0)
    )  # segments are numbered by id: it must be the first


def _session(row: Recorded, segments: Segments, context_len: int, common: tuple[int, int]) -> tuple[Session, int]:
    turns: list[Turn] = []
    ages: list[float] = []
    own = row.own
    for place, request in enumerate(own):
        if request.prompt + request.output > context_len:
            return _made(turns, ages, common), len(own) - place
        before = own[place - 1] if place else None
        turns.append(_turn(request, segments, max(0.0, request.think_time or 0.0) if before else 0.0))
        ages.append(request.t)
        asked_s = request.t + (request.api_time or 0.0)
        until_s = own[place + 1].t if place + 1 < len(own) else float("inf")
        for agent in (agent for agent in row.agents if request.t <= agent.t < until_s):
            for number, inner in enumerate(agent.requests):
                wait_s = max(0.0, agent.t - asked_s) if not number else max(0.0, inner.think_time or 0.0)
                if inner.prompt + inner.output <= context_len:
                    turns.append(_turn(inner, segments, wait_s, beside=True))
                    ages.append(agent.t + inner.t)
    return _made(turns, ages, common), 0


def _made(turns: list[Turn], ages: list[float], common: tuple[int, int]) -> Session:
    return Session(tuple(turns), 0.0, common, tuple(ages))


def _turn(request: Request, segments: Segments, wait_s: float, **more: Any) -> Turn:
    path, lengths = segments.path(request.h)
    return Turn(path, lengths, request.prompt, max(1, request.output), wait_s, **more)
