"""Sources of traces: files in three published formats, and synthetic traffic of the same shape.

`claude_code`: coding-agent sessions with long prompts that grow turn by turn and think time between the turns; block
ids of 64 tokens, local to a session. Published at github.com/callanjfox/kv-cache-tester, traces/ (Apache-2.0).
`mooncake`: chat requests over an hour with their arrival times; block ids of 512 tokens. Published at
github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl (Apache-2.0).
`azure`: requests of an hour with their arrival times and lengths alone, so that none shares a prefix. Published at
github.com/Azure/AzurePublicDataset, AzureLLMInferenceTrace_{code,conv}.csv of 2023 (CC-BY).
The synthetic traces have the medians and spreads of these (lengths, turns, think time, sharing), so that everything
runs without the files; figures should be stated for the originals.
"""

import gzip
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from math import exp, log
from pathlib import Path
from random import Random

import msgspec

from emberline.protocol.errors import BadInput
from emberline.simulator.trace import (
    DistinctBlocks,
    Runs,
    SegmentIndex,
    TraceSession,
    TraceTurn,
    TrafficTrace,
    run_lengths,
)

MOONCAKE_BLOCK_TOKENS = 512
MICROSECONDS = len("2023-11-16 18:17:03.979960")  # of a time: more digits are left out
AZURE_HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"
AGENT_KINDS = 12  # concurrent versions of tools and system prompt
AGENT_COMMON_TOKENS = 15_000  # of tools and system prompt
CHAT_REQUESTS_PER_S = 3.4
CHAT_DURATION_S = 3_600.0


def open_trace(name: str, seed: int, context_len: int) -> TrafficTrace:
    """A synthetic trace by name, or a file whose format its first line shows."""
    if name in SYNTHETIC:
        return SYNTHETIC[name](seed, context_len)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(SYNTHETIC)
        raise BadInput(
            f"there is no trace {name!r}: give a file (.jsonl or .csv, or either as .gz), or one of {known}",
            param="trace",
        )
    try:
        line = next(_read_lines(path), b"{}")
        first = {} if line.startswith(AZURE_HEADER) else msgspec.json.decode(line, type=dict)
        if line.startswith(AZURE_HEADER):
            trace = build_azure_trace(_read_lines(path), context_len)
        elif "hash_ids" in first:
            rows = msgspec.json.Decoder(MooncakeRow)
            trace = build_mooncake_trace([rows.decode(line) for line in _read_lines(path)], context_len)
        elif "requests" in first:
            sessions = msgspec.json.Decoder(RecordedSession)
            trace = build_agent_trace([sessions.decode(line) for line in _read_lines(path)], context_len)
        else:
            raise BadInput(
                f"{name} has neither Mooncake's rows (hash_ids), agents' sessions (requests) nor Azure's columns",
                param="trace",
            )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{name} cannot be read: {error}", param="trace") from None
    if not trace.sessions:
        raise BadInput(f"{name} holds no request that fits a context of {context_len} tokens", param="trace")
    return trace


def _read_lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except (gzip.BadGzipFile, EOFError) as error:
        raise BadInput(f"{path} is not a complete gzip file: {error}", param="trace") from None


# --- agent sessions --------------------------------------------------------------------------------------------------


class RecordedRequest(msgspec.Struct, rename={"prompt": "in", "output": "out"}):
    t: float  # s since the start of the session (or sub-agent)
    prompt: int = 0
    output: int = 0
    h: list[tuple[int, int]] = []
    think_time: float | None = None
    stop: str | None = None  # "tool_use": it ended with tool calls
    api_time: float | None = None
    requests: list["RecordedRequest"] = []  # of a sub-agent


class RecordedSession(msgspec.Struct):
    requests: list[RecordedRequest]
    block_size: int = 64
    tool_tokens: int = 0
    system_tokens: int = 0

    @property
    def own(self) -> list[RecordedRequest]:
        return [request for request in self.requests if request.h]

    @property
    def sub_agents(self) -> list[RecordedRequest]:
        return [request for request in self.requests if request.requests]

    @property
    def prompts(self) -> Iterator[Runs]:
        for request in self.requests:
            yield from (inner.h for inner in request.requests) if request.requests else (request.h,)

    @property
    def kind(self) -> tuple[int, int]:
        """Sessions with the same tools and system prompt share them, as they would in production."""
        return self.tool_tokens, self.system_tokens


def build_agent_trace(recorded: Iterable[RecordedSession], context_len: int) -> TrafficTrace:
    """A session ends where it exceeds the context."""
    rows = [_with_distinct_blocks(row) for row in recorded if row.own]
    kinds: dict[tuple[int, int], int] = {}
    cuts: dict[int, set[int]] = {}  # kind -> segment boundaries in the common prefix, relative to its start
    for row in rows:
        kind = kinds.setdefault(row.kind, len(kinds))
        start, n = _common_prefix(row)
        edges = (edge - start for runs in row.prompts for first, k in runs for edge in (first, first + k))
        cuts.setdefault(kind, set()).update(edge for edge in edges if 0 < edge <= n)
    sessions = []
    n_segments = n_skipped = 0
    for row in rows:
        kind = kinds[row.kind]
        start, n = _common_prefix(row)
        segments = SegmentIndex(row.prompts, {start, start + n, *(start + cut for cut in cuts[kind] if cut < n)})
        common = (kind, segments.number(start + n)) if n else (0, 0)
        session, skipped = _agent_session(row, segments, context_len, common)
        n_skipped += skipped
        n_segments = max(n_segments, len(segments))
        if session.turns:
            sessions.append(session)
    block_tokens = rows[0].block_size if rows else 64
    return TrafficTrace("claude_code", block_tokens, sessions, n_segments, False, n_skipped)


def _with_distinct_blocks(row: RecordedSession) -> RecordedSession:
    blocks = DistinctBlocks(1 + max(first + n for runs in row.prompts for first, n in runs))

    def distinct(request: RecordedRequest) -> RecordedRequest:
        inner = [distinct(each) for each in request.requests]
        return msgspec.structs.replace(request, h=[*blocks.of(request.h)], requests=inner)

    return msgspec.structs.replace(row, requests=[distinct(request) for request in row.requests])


def _common_prefix(row: RecordedSession) -> tuple[int, int]:
    """(first id, blocks) that a session shares with others of its kind: from the first run of its first prompt.

    Segments are numbered by id, so only a run with the session's lowest ids can be common.
    """
    first, n = row.own[0].h[0]
    lowest = min(start for runs in row.prompts for start, _ in runs)
    wanted = (row.tool_tokens + row.system_tokens) // row.block_size
    return (first, min(n, wanted) if first == lowest else 0)


def _agent_session(
    row: RecordedSession, segments: SegmentIndex, context_len: int, common: tuple[int, int]
) -> tuple[TraceSession, int]:
    """(the session up to the context limit, requests skipped after it)"""
    turns: list[TraceTurn] = []
    times_s: list[float] = []
    own, n_skipped = row.own, 0
    for place, request in enumerate(own):
        if request.prompt + request.output > context_len:
            n_skipped = len(own) - place
            break
        turns.append(_turn(request, segments, max(0.0, request.think_time or 0.0) if place else 0.0))
        times_s.append(request.t)
        answered_s = request.t + (request.api_time or 0.0)
        until_s = own[place + 1].t if place + 1 < len(own) else float("inf")
        for agent in (agent for agent in row.sub_agents if request.t <= agent.t < until_s):
            for number, inner in enumerate(agent.requests):
                wait_s = max(0.0, inner.think_time or 0.0) if number else max(0.0, agent.t - answered_s)
                if inner.prompt + inner.output <= context_len:
                    turns.append(_turn(inner, segments, wait_s, is_sub_agent=True))
                    times_s.append(agent.t + inner.t)
    return TraceSession(tuple(turns), 0.0, common, tuple(times_s)), n_skipped


def _turn(request: RecordedRequest, segments: SegmentIndex, wait_s: float, is_sub_agent: bool = False) -> TraceTurn:
    path, lengths = segments.path(request.h)
    return TraceTurn(
        path,
        lengths,
        request.prompt,
        max(1, request.output),
        wait_s,
        called_tools=request.stop == "tool_use",
        is_sub_agent=is_sub_agent,
    )


# --- Mooncake's conversations ----------------------------------------------------------------------------------------


class MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def build_mooncake_trace(rows: Iterable[MooncakeRow], context_len: int) -> TrafficTrace:
    """One turn per session: the trace does not name conversations, only their blocks show them."""
    kept, n_skipped = [], 0
    for row in rows:
        if len(row.hash_ids) != -(-row.input_length // MOONCAKE_BLOCK_TOKENS):
            raise BadInput("a row's hash_ids do not fit its input_length in blocks of 512 tokens", param="trace")
        if row.input_length + row.output_length > context_len or row.input_length < 1:
            n_skipped += 1
        else:
            kept.append(row)
    blocks = DistinctBlocks(1 + max((max(row.hash_ids) for row in kept), default=0))
    prompts = [blocks.of(run_lengths(row.hash_ids)) for row in kept]
    segments = SegmentIndex(prompts)
    sessions = []
    for row, runs in zip(kept, prompts):
        path, lengths = segments.path(runs)
        turn = TraceTurn(path, lengths, row.input_length, max(1, row.output_length))
        second = row.hash_ids[1] if len(row.hash_ids) > 1 else row.hash_ids[0]  # all conversations share the first
        sessions.append(TraceSession((turn,), row.timestamp / 1e3, group=second + 1))
    return TrafficTrace("mooncake", MOONCAKE_BLOCK_TOKENS, sessions, len(segments), True, n_skipped)


# --- Azure's requests ------------------------------------------------------------------------------------------------


def build_azure_trace(lines: Iterable[bytes], context_len: int) -> TrafficTrace:
    """Build a trace from the lines after the header. Each request has blocks of its own."""
    rows: list[MooncakeRow] = []
    first_s, next_id = None, 0
    for number, line in enumerate(lines, start=1):
        if number == 1:
            continue
        try:
            time, n_prompt, n_output = line.decode().strip().split(",")
            at_s = datetime.fromisoformat(time[:MICROSECONDS]).replace(tzinfo=UTC).timestamp()
            prompt, output = int(n_prompt), int(n_output)
        except ValueError:
            raise BadInput(f"line {number} is not a time, prompt tokens and output tokens", param="trace") from None
        first_s = at_s if first_s is None else first_s
        ids = range(next_id, next_id + -(-prompt // MOONCAKE_BLOCK_TOKENS))
        next_id = ids.stop
        rows.append(MooncakeRow(1e3 * (at_s - first_s), prompt, output, list(ids)))
    trace = build_mooncake_trace(rows, context_len)
    trace.name = "azure"
    return trace


# --- synthetic traffic -----------------------------------------------------------------------------------------------


def synthetic_agents(seed: int, context_len: int, n_sessions: int = 300) -> TrafficTrace:
    """Coding agents: a long first prompt, about 45 turns of a few hundred new tokens, think time, rare long pauses."""
    rng = Random(f"agents {seed}")
    trace = build_agent_trace([_synthetic_session(rng) for _ in range(n_sessions)], context_len)
    trace.name = "agents"
    return trace


def synthetic_chats(seed: int, context_len: int) -> TrafficTrace:
    """Chat: many short conversations that share one system prompt, a few long documents."""
    rng = Random(f"chats {seed}")
    trace = build_mooncake_trace(sorted(_chat_rows(rng), key=lambda row: row.timestamp), context_len)
    trace.name = "chats"
    return trace


SYNTHETIC = {"agents": synthetic_agents, "chats": synthetic_chats}


def _synthetic_session(rng: Random) -> RecordedSession:
    kind = rng.randrange(AGENT_KINDS)
    prompt = int(AGENT_COMMON_TOKENS + _lognormal(rng, 25_000, 1.2))
    requests: list[RecordedRequest] = []
    runs: Runs = []
    next_id, t = 1, 0.0
    for _ in range(max(1, int(_lognormal(rng, 45, 0.9)))):
        runs, next_id = _extended(runs, -(-prompt // 64), next_id)
        output = max(1, int(_lognormal(rng, 216, 1.1)))
        think_s = _think_time_s(rng) if requests else 0.0
        api_s = 2.0 + output / 60
        t += think_s
        requests.append(
            RecordedRequest(t=t, prompt=prompt, output=output, h=list(runs), think_time=think_s, api_time=api_s)
        )
        t += api_s
        prompt += max(32, int(_lognormal(rng, 653, 1.4)))
    return RecordedSession(
        requests=requests, tool_tokens=AGENT_COMMON_TOKENS - 2_000 - 64 * kind, system_tokens=2_000 + 64 * kind
    )


def _think_time_s(rng: Random) -> float:
    return _lognormal(rng, 3_000, 1.0) if rng.random() < 0.02 else _lognormal(rng, 10, 1.4)


def _extended(runs: Runs, n_blocks: int, next_id: int) -> tuple[Runs, int]:
    """The blocks of a prompt that extends the previous one, whose last, partly filled block is replaced."""
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


def _chat_rows(rng: Random) -> list[MooncakeRow]:
    rows: list[MooncakeRow] = []
    next_id, n_wanted = 1, int(CHAT_REQUESTS_PER_S * CHAT_DURATION_S)
    while len(rows) < n_wanted:
        t = rng.uniform(0.0, CHAT_DURATION_S)
        prompt, ids = int(_lognormal(rng, 6_000, 1.2)) + 64, [0]
        for _ in range(1 + int(rng.expovariate(1 / 0.9))):
            n_blocks = -(-prompt // MOONCAKE_BLOCK_TOKENS)
            ids = ids[: max(1, len(ids) - 1)]
            fresh = range(next_id, next_id + n_blocks - len(ids))
            ids, next_id = [*ids, *fresh], fresh.stop
            output = max(1, int(_lognormal(rng, 300, 0.8)))
            if t < CHAT_DURATION_S:
                rows.append(
                    MooncakeRow(timestamp=1e3 * t, input_length=prompt, output_length=output, hash_ids=ids[:n_blocks])
                )
            t += _lognormal(rng, 60, 1.0)
            prompt += output + int(_lognormal(rng, 800, 1.3))
    return rows[:n_wanted]


def _lognormal(rng: Random, median: float, sigma: float) -> float:
    return exp(rng.gauss(log(median), sigma))
