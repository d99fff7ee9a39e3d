"""A trace from a server's own usage rows: sessions whose prompts grow, with their lengths, arrivals and think times.

A row has no text, so which blocks two prompts share is inferred. A turn of a session shares the prompt and reply of the
turn before it as far as it is long enough, and what was cached of it if it is shorter (the client has compacted). Rows
without a session join one whose last prompt and reply explain the number of their cached tokens. What was cached of
first turns is taken for a prefix that all prompts of the account share.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.simulator.trace import Runs, SegmentIndex, TraceSession, TraceTurn, TrafficTrace

TRACE_BLOCK_TOKENS = 4 * BLOCK_TOKENS  # of the trace: coarser than the engine's, and faster to replay
RECENT = 256  # last requests of an account, among which the session of a row without one is looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """One request that has ended. Times are Unix seconds."""

    account: str
    session: str = ""  # empty: the client named none
    arrival_s: float
    first_token_s: float | None = None
    end_s: float
    input_tokens: int
    cached_tokens: int = 0
    output_tokens: int

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def itl_s(self) -> float | None:
        """Mean inter-token latency. Returns None for replies of less than two tokens."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(slots=True)
class _Turn:
    row: RecordedRow
    runs: Runs
    reply: tuple[int, int]  # first block and number of blocks that the reply fills


@dataclass(slots=True)
class _Session:
    turns: list[_Turn] = field(default_factory=list)

    @property
    def last(self) -> RecordedRow:
        return self.turns[-1].row

    def history(self) -> list[tuple[int, int]]:
        """Full blocks of the last prompt, then those of its reply."""
        turn = self.turns[-1]
        runs = _take(turn.runs, turn.row.input_tokens // TRACE_BLOCK_TOKENS)
        return [*runs, turn.reply] if turn.reply[1] else runs


class _Builder:
    """Assigns block ids to the prompts of rows that come in order of arrival."""

    def __init__(self, prefixes: dict[str, int]) -> None:
        """prefixes: blocks that prompts of each account share at the most."""
        self.sessions: list[_Session] = []
        self._named: dict[tuple[str, str], _Session] = {}
        self._recent: dict[str, deque[_Session]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._prefix: dict[str, tuple[int, int]] = {}
        self._next = 1
        for account, n_blocks in prefixes.items():
            self._prefix[account] = (self._new(n_blocks), n_blocks)

    def _new(self, n_blocks: int) -> int:
        first, self._next = self._next, self._next + n_blocks
        return first

    def add(self, row: RecordedRow) -> None:
        session = self._session_of(row)
        if session is None:
            session = _Session()
            self.sessions.append(session)
            first, n_prefix = self._prefix.get(row.account, (0, 0))
            shared: list[tuple[int, int]] = [(first, min(n_prefix, row.cached_tokens // TRACE_BLOCK_TOKENS))]
        else:
            last = session.last
            known = last.input_tokens + last.output_tokens
            if row.input_tokens >= known:
                common = known
            else:
                common = last.input_tokens if row.input_tokens >= last.input_tokens else row.cached_tokens
            shared = _take(session.history(), common // TRACE_BLOCK_TOKENS)
        n_blocks = -(-row.input_tokens // TRACE_BLOCK_TOKENS)
        shared = _take(shared, n_blocks)
        n_new = n_blocks - sum(n for _, n in shared)
        runs = [run for run in shared if run[1]] + ([(self._new(n_new), n_new)] if n_new else [])
        n_reply = (row.input_tokens + row.output_tokens) // TRACE_BLOCK_TOKENS - row.input_tokens // TRACE_BLOCK_TOKENS
        session.turns.append(_Turn(row, runs, (self._new(n_reply), n_reply)))
        if row.session:
            self._named[row.account, row.session] = session
        recent = self._recent[row.account]
        if not recent or recent[-1] is not session:
            recent.append(session)

    def _session_of(self, row: RecordedRow) -> _Session | None:
        if row.session:
            return self._named.get((row.account, row.session))
        if row.cached_tokens < TRACE_BLOCK_TOKENS:
            return None
        for session in reversed(self._recent[row.account]):
            last = session.last
            known = last.input_tokens + last.output_tokens
            explains = last.input_tokens - BLOCK_TOKENS < row.cached_tokens <= known < row.input_tokens
            if explains and not last.session and last.end_s <= row.arrival_s:
                return session
        return None


def build_recorded_trace(rows: Iterable[RecordedRow], context_len: int, name: str = "recorded") -> TrafficTrace:
    """Build a trace of rows; those that exceed the context, or have no tokens, are left out."""
    found = sorted(rows, key=lambda row: row.arrival_s)
    kept = [
        row
        for row in found
        if row.input_tokens > 0 and row.output_tokens > 0 and row.input_tokens + row.output_tokens <= context_len
    ]
    named: set[tuple[str, str]] = set()
    prefixes: dict[str, int] = defaultdict(int)
    for row in kept:
        if not row.session or (row.account, row.session) not in named:
            shared = row.cached_tokens // TRACE_BLOCK_TOKENS if row.session else 0
            prefixes[row.account] = max(prefixes[row.account], shared)
            named.add((row.account, row.session))
    builder = _Builder(prefixes)
    for row in kept:
        builder.add(row)
    turns = [turn for session in builder.sessions for turn in session.turns]
    index = SegmentIndex([turn.runs for turn in turns] + [[turn.reply] for turn in turns if turn.reply[1]])
    start_s = kept[0].arrival_s if kept else 0.0
    sessions = [_session(session, index, start_s) for session in builder.sessions]
    return TrafficTrace(name, TRACE_BLOCK_TOKENS, sessions, len(index), shared=True, left_out=len(found) - len(kept))


def _session(session: _Session, index: SegmentIndex, start_s: float) -> TraceSession:
    turns, end_s = [], session.turns[0].row.arrival_s
    for turn in session.turns:
        path, lengths = index.path(turn.runs)
        first, n_reply = turn.reply
        whole = n_reply > 0 and index.number(first) == index.number(first + n_reply - 1)
        turns.append(
            TraceTurn(
                path,
                lengths,
                turn.row.input_tokens,
                turn.row.output_tokens,
                wait_s=max(0.0, turn.row.arrival_s - end_s),
                reply=(index.number(first), n_reply) if whole else (0, 0),
            )
        )
        end_s = turn.row.end_s
    return TraceSession(tuple(turns), start_s=session.turns[0].row.arrival_s - start_s)


def _take(runs: Sequence[tuple[int, int]], n_blocks: int) -> list[tuple[int, int]]:
    """The first blocks of runs."""
    found: list[tuple[int, int]] = []
    for first, n in runs:
        if n_blocks <= 0:
            break
        found.append((first, min(n, n_blocks)))
        n_blocks -= n
    return found


def busiest(rows: Sequence[RecordedRow], window_s: float) -> list[RecordedRow]:
    """The rows of the window in which the most tokens were asked for, in order of arrival."""
    ordered = sorted(rows, key=lambda row: row.arrival_s)
    best, most, first, total = (0, 0), -1, 0, 0
    for last, row in enumerate(ordered):
        total += row.input_tokens + row.output_tokens
        while ordered[first].arrival_s < row.arrival_s - window_s:
            total -= ordered[first].input_tokens + ordered[first].output_tokens
            first += 1
        if total > most:
            best, most = (first, last + 1), total
    return ordered[slice(*best)]
