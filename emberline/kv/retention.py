"""Retention: which KV blocks are worth keeping, told from what agents do. Pure: no clock, no I/O, no threads.

The blocks that a conversation leaves behind are one run in each tier, evicted last block first. A run's kind says what
its conversation waits for; how soon runs of a kind are used again is learned, and the next victim is the run with the
lowest rate of return at its age: priorities decay, and a conversation that waits for a tool outlives one whose user
thinks. `Retention` follows conversations; `EvictionOrder` (eviction_order.py) orders the blocks of one tier.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from math import frexp
from typing import Protocol

N_BINS = 18  # of return times: bin b holds 2^b to 2^(b+1) seconds, the first also less, the last also more
MAX_TURNS = 4096  # of a kind that the learned distribution remembers; then older ones count half
MAX_SESSIONS = 20_000  # that a worker remembers, whether or not it still has their blocks
MAX_BRANCHES = 4  # of one session
SAMPLE = 8  # blocks per remembered key of a conversation
KEY_BYTES = 8  # of each
SIDE_TURNS = 3  # after so many turns without the main conversation, a side conversation is the main one
OWNER_SHARE, HINTED_SHARE = 0.25, 0.5  # of a tier that hints may hold: of one owner, and of all together


class Kind(IntEnum):
    """Event that the conversation of a run waits for. In this order: evicted first, by rate of return, evicted last."""

    EMPTY = 0  # no content
    DEAD = 1  # superseded by another continuation, or its session is final
    SIDE = 2  # not its session's main conversation: titles, sub-agents
    IDLE = 3  # its user
    TOOL = 4  # its tools: the turn ended with tool calls
    SHARED = 5  # any of several: a prefix such as system prompt and tools. It goes when it is older than all others


# Turns of coding agents that returned within each bin of time, of PRIOR_TURNS that ended: what is assumed before a
# worker has seen its own. Those of tools mostly return within 20 s; users return within minutes, or not at all. Of side
# requests half are taken to be sub-agents, and half titles and the like, which nobody continues. Read from half of the
# recorded sessions (benchmarks/kv_retention.py --part tuning --priors), so that the others can judge them.
PRIOR_TURNS = 64.0
PRIORS: dict[Kind, tuple[float, ...]] = {
    Kind.TOOL: (0.3, 3.8, 24.4, 16.6, 7.3, 3.6, 3.1, 1.8, 1.1, 1.0, 0.2, 0.2, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01),
    Kind.IDLE: (0.9, 2, 2.1, 3, 7.5, 10, 8, 8.7, 5.9, 5.5, 3, 2.9, 0.6, 0.4, 0.1, 0.05, 0.02, 0.01),
    Kind.SIDE: (0.6, 9.5, 14, 0.6, 1.1, 2.2, 1.1, 0.6, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01, 0.01, 0.01, 0.01),
}


class ReturnTimes:
    """After how long conversations come back, by the kind of their last turn; learned."""

    def __init__(self) -> None:
        self._ended = dict.fromkeys(PRIORS, PRIOR_TURNS)
        self._returned = {kind: list(counts) for kind, counts in PRIORS.items()}
        self._rates: dict[Kind, tuple[float, ...]] = {}

    def ended(self, kind: Kind, instead_of: Kind | None = None) -> None:
        if instead_of is not None:
            self._ended[instead_of] -= 1
        self._ended[kind] += 1
        self._rates.pop(kind, None)
        if self._ended[kind] > MAX_TURNS:
            self._ended[kind] /= 2
            self._returned[kind] = [n / 2 for n in self._returned[kind]]

    def returned(self, kind: Kind, after_s: float) -> None:
        self._returned[kind][return_bin(after_s)] += 1
        self._rates.pop(kind, None)

    def rate(self, kind: Kind, age_s: float) -> float:
        """Returns per second to expect of a turn that ended `age_s` ago: never more than at a younger age."""
        rates = self._rates.get(kind)
        if rates is None:
            rates = self._rates[kind] = _rates(self._ended[kind], self._returned[kind])
        return rates[return_bin(age_s)]


def return_bin(age_s: float) -> int:
    """The bin of a time between two turns."""
    return min(N_BINS - 1, frexp(age_s)[1] - 1) if age_s >= 1.0 else 0


def _rates(n_ended: float, returned: Sequence[float]) -> tuple[float, ...]:
    rates, left = [], n_ended
    for place, n in enumerate(returned):
        left = max(left, n, 1e-6)
        width_s = 2.0 if place == 0 else float(1 << place)
        rates.append(n / left / width_s)
        left -= n
    for place in range(N_BINS - 2, -1, -1):
        rates[place] = max(rates[place], rates[place + 1])
    return tuple(rates)


class Conversation:
    """A chain of turns, each of which extends the one before it. Changed by its `Retention` alone."""

    __slots__ = ("ended_s", "hint_s", "keys", "kind", "n_blocks", "n_shared", "n_since_main", "owner", "session")

    def __init__(self, owner: bytes, session: bytes) -> None:
        self.owner, self.session = owner, session  # session: empty where the client has not named it
        self.kind = Kind.IDLE
        self.ended_s = -1.0  # when its last turn ended; below 0: none has
        self.hint_s = 0.0  # how long after that its blocks should stay, by the client's wish
        self.n_blocks = 0  # of its last turn
        self.n_shared = 0  # leading blocks that other sessions have, too
        self.n_since_main = 0  # turns of it since the last one of the session's main conversation
        self.keys = b""  # the first bytes of every SAMPLE-th content key


class Listener(Protocol):
    """An order of eviction that follows changes of conversations. Called by the thread of `Retention`."""

    def changed(self, conversation: Conversation, n_superseded: int = 0) -> None:
        """Handle a conversation whose kind or time of use has changed, and whose last `n_superseded` blocks are no
        longer part of it."""


class Retention:
    """The conversations of a worker. A turn begins, ends, and is told to have ended with tool calls.

    `sample`: content keys of a conversation per key that is remembered. `max_sessions`: sessions that are remembered,
    and as many conversations without one.
    """

    def __init__(self, sample: int = SAMPLE, max_sessions: int = MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._every = sample
        self.now_s = 0.0  # on any clock that does not go back; set by the owner
        self.times = ReturnTimes()
        self._listeners: tuple[Listener, ...] = ()
        self._sessions: OrderedDict[tuple[bytes, bytes], list[Conversation]] = OrderedDict()  # the main one first
        self._unnamed: dict[bytes, Conversation] = {}  # without a session, by the last key of the last turn

    @property
    def n_remembered(self) -> int:
        """Conversations that are remembered, with a session or without."""
        return sum(map(len, self._sessions.values())) + len(self._unnamed)

    def add_listener(self, listener: Listener) -> None:
        self._listeners += (listener,)

    def remove_listener(self, listener: Listener) -> None:
        self._listeners = tuple(other for other in self._listeners if other is not listener)

    def begin(self, owner: bytes, session: bytes, keys: Sequence[bytes], n_shared: int) -> Conversation:
        """A turn arrives whose prompt begins with these content keys. `owner`: the root key of its chain.

        n_shared: the leading blocks that the device had. If this is the conversation's first turn, others made them.
        """
        sampled = self._sample(keys)
        found = self._find(owner, session, sampled)
        if found is None:
            found = Conversation(owner, session)
            found.n_shared = n_shared
            self._remember(found)
        elif found.ended_s >= 0:
            self.times.returned(found.kind, max(0.0, self.now_s - found.ended_s))
            found.ended_s = -1.0
            self._tell(found)
        self._rank(found, len(keys))
        return found

    def end(self, conversation: Conversation, keys: Sequence[bytes], hint_s: float = 0.0, final: bool = False) -> None:
        """The turn is over, and these are the content keys of its conversation's full blocks."""
        conversation.keys, conversation.n_blocks = self._sample(keys), len(keys)
        if not conversation.session and conversation.keys:
            self._unnamed[conversation.owner + conversation.keys[-KEY_BYTES:]] = conversation
            if len(self._unnamed) > self._max_sessions:
                del self._unnamed[next(iter(self._unnamed))]
        branches = self._sessions.get((conversation.owner, conversation.session), (conversation,))
        if final:
            for other in {*branches, conversation}:
                self._die(other)
            return
        conversation.kind = Kind.IDLE if branches[0] is conversation else Kind.SIDE
        conversation.ended_s, conversation.hint_s = self.now_s, hint_s
        self.times.ended(conversation.kind)
        self._tell(conversation)

    def ended_with_tool_calls(self, conversation: Conversation) -> None:
        """Correct what `end` did not know: the turn called tools, whose results are expected soon."""
        if conversation.kind is Kind.IDLE and conversation.ended_s >= 0:
            conversation.kind = Kind.TOOL
            self.times.ended(Kind.TOOL, instead_of=Kind.IDLE)
            self._tell(conversation)

    def _sample(self, keys: Sequence[bytes]) -> bytes:
        return b"".join([key[:KEY_BYTES] for key in keys[self._every - 1 :: self._every]])

    # --- which conversation a turn belongs to ------------------------------------------------------------------------

    def _find(self, owner: bytes, session: bytes, sampled: bytes) -> Conversation | None:
        """The conversation that a prompt continues, or of which it changes the second half."""
        if not session:
            ends = range(len(sampled), 0, -KEY_BYTES)
            tails = (owner + sampled[end - KEY_BYTES : end] for end in ends)
            return next((found for tail in tails if (found := self._unnamed.pop(tail, None)) is not None), None)
        branches = self._sessions.get((owner, session))
        if branches is None:
            return None
        self._sessions.move_to_end((owner, session))
        n_common, found = max(((_n_common(one.keys, sampled), one) for one in branches), key=lambda pair: pair[0])
        n_known = len(found.keys) // KEY_BYTES
        if 2 * n_common < n_known:
            return None  # another conversation, maybe with the same system prompt
        if n_common < min(n_known, len(sampled) // KEY_BYTES) and found.ended_s >= 0:
            n_kept = self._every * (n_common + 1) - 1
            self._tell(found, max(0, found.n_blocks - n_kept))
            found.n_blocks = n_kept
        return found

    def _remember(self, new: Conversation) -> None:
        if not new.session:
            return
        branches = self._sessions.setdefault((new.owner, new.session), [])
        branches[:] = [other for other in branches if other.kind is not Kind.DEAD]
        branches.append(new)
        if len(branches) > MAX_BRANCHES:
            del branches[1]
        if len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)

    def _rank(self, turn: Conversation, n_blocks: int) -> None:
        """Choose the session's main conversation: the longest one, unless that is not continued."""
        branches = self._sessions.get((turn.owner, turn.session))
        if branches is None or turn not in branches:
            return
        main = branches[0]
        turn.n_since_main += 1
        if turn is main:
            for other in branches:
                other.n_since_main = 0
        elif n_blocks > main.n_blocks or turn.n_since_main >= SIDE_TURNS:
            branches.remove(turn)
            branches.insert(0, turn)
            if n_blocks <= main.n_blocks and main.ended_s >= 0:
                branches.remove(main)
                self._die(main)  # compacted: its session goes on without it

    def _die(self, conversation: Conversation) -> None:
        conversation.kind, conversation.ended_s, conversation.hint_s = Kind.DEAD, -1.0, 0.0
        self._tell(conversation)

    def _tell(self, conversation: Conversation, n_superseded: int = 0) -> None:
        for listener in self._listeners:
            listener.changed(conversation, n_superseded)


def _n_common(known: bytes, sampled: bytes) -> int:
    """Leading samples that are equal. A key names all that comes before it, so this is a binary search."""
    low, high = 0, min(len(known), len(sampled)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice(KEY_BYTES * (middle - 1), KEY_BYTES * middle)
        low, high = (middle, high) if known[at] == sampled[at] else (low, middle - 1)
    return low
