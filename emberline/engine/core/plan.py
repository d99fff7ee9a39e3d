"""One step as plain data: the scheduler decides it, a runner executes it, on one device or on many ranks.

A runner keeps state per slot. A plan says which sequence takes a slot, then only what is new: tokens and blocks. Rows
of sequences that decode, with nothing unusual about them, are columns of one array, which holds the packet that kernels
read. All others are `Row` objects: chunks of prompts, rows with drafts, bans or a grammar.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.rows import Ints
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import unpack

# Rows of `StepPlan.columns`. From SLOT on they are a packet of `kernels.decode_inputs`: after the token, there is a new
# block for each KV group, then the number of leading blocks of each that have left the window.
SLOT, START, TOKEN, BLOCKS = range(2, 6)  # after the number of the sequence and that of its admission
LAST_SAMPLED = NO_BLOCK = -1  # as `kernels.decode_inputs` has them


@dataclass(slots=True)
class Admission:
    """A sequence takes a slot: everything about it that stays the same from step to step."""

    slot: int
    request: EngineRequest
    seed: int  # u64
    output_ids: bytes  # u32 LE; its output before a preemption, or that it resumes
    blocks: list[list[int]]  # per group: the block table it starts with, from the prefix cache


UNKNOWN_DRAFT = b"\xff\xff\xff\xff"  # in place of a draft's id: the one that the device has left in the slot
_UNKNOWN = int.from_bytes(UNKNOWN_DRAFT, "little")


class Row(msgspec.Struct, gc=False, array_like=True):
    """New tokens of one sequence: the last of its context, whose KV goes into its blocks.

    Hundreds are created per step: a msgspec struct without gc is created in C and ignored by the garbage collector.
    """

    number: int  # sequence number, unique in this engine's life, unlike slots and request ids
    slot: int
    start: int  # position of the first new token
    token_ids: bytes  # u32 LE; empty when it follows
    blocks: list[list[int]] | None  # per group: appended to the slot's block table; None: nothing
    passed: list[int]  # per group: leading table entries that have left the attention window
    samples: bool  # sample the token that follows
    banned: tuple[int, ...] = ()  # token ids that must not be sampled
    admission: int = 0  # serial number of the admission that gave it the slot
    follows: bool = False  # its one new token is the one the slot sampled last, which may be known to the device alone
    draft_ids: bytes = b""  # u32 LE; tokens that may follow: computed with the others, each verified by a draw
    n_ahead: int = 0  # drafts of rows in flight, on which its position depends: it is up to so many lower
    n_scored: int = 0  # leading tokens after which the log-probability of the prompt's next token is wanted

    @property
    def end(self) -> int:
        """The position after its tokens, which is that of the first draw; drafts come behind it."""
        return self.start + 1 if self.follows else self.start + len(self.token_ids) // 4

    @property
    def n_drafts(self) -> int:
        return len(self.draft_ids) >> 2

    @property
    def n_draws(self) -> int:
        """Number of tokens that it samples: one, and one more per draft."""
        return 1 + (len(self.draft_ids) >> 2) if self.samples else 0

    @property
    def stop(self) -> int:
        """The position after its drafts: so far its blocks reach."""
        return self.end + self.n_drafts


class Columns:
    """Rows of sequences that decode: each computes one token and samples the next."""

    __slots__ = ("cells", "n")

    def __init__(self, cells: Ints) -> None:
        self.cells = cells  # int32 [BLOCKS + 2 * groups, n]
        self.n: int = cells.shape[1]

    def __len__(self) -> int:
        return self.n

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and np.array_equal(self.cells, other.cells)

    @property
    def slots(self) -> list[int]:
        """Slots of the rows."""
        slots: list[int] = self.cells[SLOT].tolist()
        return slots

    @property
    def packet(self) -> Ints:
        """The packet that kernels read."""
        return self.cells[SLOT:]

    def rows(self, places: Sequence[int] | slice = slice(None)) -> list[Row]:
        """Rows as objects: those at some places, or all."""
        n_groups = (len(self.cells) - BLOCKS) // 2
        rows = []
        for number, admission, slot, start, token, *groups in self.cells[:, places].T.tolist():
            blocks = None if groups[0] == NO_BLOCK else [[block] for block in groups[:n_groups]]
            follows = token == LAST_SAMPLED
            token_ids = b"" if follows else token.to_bytes(4, "little")
            rows.append(Row(number, slot, start, token_ids, blocks, groups[n_groups:], True, (), admission, follows))
        return rows

    def encode(self) -> tuple[int, bytes]:
        """The rows as plain data: how many there are, and their cells."""
        return len(self), self.cells.tobytes()

    @classmethod
    def decode(cls, encoded: tuple[int, bytes]) -> "Columns":
        """Rows that were encoded."""
        n_rows, cells = encoded
        return cls(np.frombuffer(cells, np.int32).reshape(-1, n_rows)) if n_rows else NO_COLUMNS


NO_COLUMNS = Columns(np.zeros((BLOCKS, 0), np.int32))


@dataclass(slots=True)
class StepPlan:
    """Everything that each rank does in a step. Without rows nothing is computed: there are orders alone."""

    admissions: list[Admission] = field(default_factory=list)
    others: list[Row] = field(default_factory=list)  # rows that are no columns
    n_tokens: int = 0  # drafts included
    n_drafts: int = 0
    n_drafting: int = 0  # rows that have drafts
    n_awaited: int = 0  # of these, rows of sequences that have no other row before it was absorbed
    depth: int = 0  # tokens that a draft head proposes behind each row that samples; 0: none
    masked: bool = False  # what some rows may sample is restricted: masks come after the launch
    n_scored: int = 0  # tokens of prompts whose log-probability is wanted
    n_preempted: int = 0  # running sequences whose blocks were taken for these rows
    number: int = 0  # steps are launched in this order
    after: int = 0  # this step and all before it have completed: orders may read the blocks that they wrote
    orders: dict[str, list[Any]] = field(default_factory=dict)  # by feature: what to do beside computing the rows
    columns: Columns = field(default_factory=lambda: NO_COLUMNS)
    before: list[int] = field(default_factory=list)  # for each of the others: columns that come before it

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return self.columns.n + len(self.others)

    @property
    def rows(self) -> list[Row]:
        """All rows as objects, in the order in which they draw."""
        if not len(self.columns):
            return self.others
        rows = self.columns.rows()
        for n, row in enumerate(self.others):
            rows.insert(self.before[n] + n, row)
        return rows

    @property
    def follows(self) -> bool:
        """True if some row's token is sampled by a step in flight."""
        return any(row.follows for row in self.others) or LAST_SAMPLED in self.columns.cells[TOKEN]

    def first_draws(self) -> tuple[list[int], Sequence[int]]:
        """Indices among all draws of the step: the first draw of each of the others, and that of each column."""
        firsts, columns, n_drawn = list[int](), list[int](), 0
        for row, n_before in zip(self.others, self.before or [0] * len(self.others)):
            columns += range(len(columns) + n_drawn, n_before + n_drawn)
            firsts.append(n_before + n_drawn)
            n_drawn += row.n_draws
        columns += range(len(columns) + n_drawn, len(self.columns) + n_drawn)
        return firsts, columns


@dataclass(slots=True)
class Masks:
    """Tokens that may be sampled, for the draws of the rows whose request restricts them."""

    rows: list[int]  # indices of these draws among all draws of the plan; those of one row follow each other
    bits: NDArray[np.uint32]  # [rows, words]; bit i % 32 of word i // 32: token i is allowed


def merged_masks(found: Sequence[Masks]) -> Masks | None:
    """Masks of several features, which are for different draws, as one. Returns None if there are none."""
    if len(found) < 2:
        return found[0] if found else None
    rows, bits = [row for each in found for row in each.rows], np.concatenate([each.bits for each in found])
    order = sorted(range(len(rows)), key=rows.__getitem__)
    return Masks([rows[at] for at in order], bits[order])


class DeviceLost(Exception):
    """The device reported an error from which only a new process recovers."""


class Sampled(Protocol):
    """One draw: the token sampled after a row's tokens, or after one of its drafts.

    A negative id: the model produced invalid numbers, or the draft before it was left out or not masked in time.
    """

    @property
    def token_id(self) -> int: ...

    @property
    def logprob(self) -> float | None: ...

    @property
    def top(self) -> list[tuple[int, float]]: ...


class SampledToken(msgspec.Struct, gc=False):
    """A `Sampled`."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Draws(Sequence[SampledToken]):
    """Draws of a step in which nobody wants probabilities: their ids; an object is made of those that are looked at."""

    __slots__ = ("token_ids",)

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, at: int) -> SampledToken: ...
    @overload
    def __getitem__(self, at: slice) -> list[SampledToken]: ...
    def __getitem__(self, at: int | slice) -> SampledToken | list[SampledToken]:
        found = self.token_ids[at]
        return [SampledToken(token_id) for token_id in found] if isinstance(found, list) else SampledToken(found)


class RowScores(NamedTuple):
    """Log-probabilities of the prompt tokens that follow a row's `n_scored` leading tokens."""

    logprobs: NDArray[np.float32]  # [n_scored]
    ranks: NDArray[np.int32]  # [n_scored]; 1: no token was more likely
    top_ids: NDArray[np.int32]  # [n_scored, k]
    top_logprobs: NDArray[np.float32]  # [n_scored, k]

    def after(self, n: int) -> "RowScores":
        """The scores without the first n."""
        return RowScores(self.logprobs[n:], self.ranks[n:], self.top_ids[n:], self.top_logprobs[n:])


class Handle(Protocol):
    """A step whose forward pass was launched."""

    def sample(self, masks: Masks | None = None) -> None:
        """Once, after the launch: sample. Masks are computed while the forward pass runs."""

    def result(self) -> Sequence[Sampled]:
        """Blocks; the draws of the rows that sample, in the order of the plan: one, and one more per draft. Those
        behind a draft that was not drawn mean nothing. Raises what the step raised."""

    def drafts(self) -> Sequence[bytes]:
        """After `result`: what a draft head proposes behind the last token of each row that samples (u32 LE), in the
        order of the plan; empty unless the plan has asked for it."""

    def scores(self) -> Sequence[RowScores]:
        """After `result`: log-probabilities of prompt tokens, for each row that has `n_scored`, in their order."""


class Runner(Protocol):
    def launch(self, plan: StepPlan) -> Handle: ...


def n_accepted(drawn: Sequence[int], draft_ids: bytes) -> int:
    """Number of a row's drafts that are accepted: as long as the draw before a draft is the draft. Of its draws, which
    are one more than its drafts, as many count, and the first.

    A draft is verified by the model's own draws: the noise of a draw depends on seed, position and token id alone, so
    what is drawn after accepted drafts is what would have been drawn without any. A draft can cost time, never a wrong
    token. A draw that is not valid ends the run: the next step draws it again. So do draws after a wrong draft whose id
    only the device knows.
    """
    last, n = drawn[0], 0
    for draft in unpack(draft_ids):
        token_id = drawn[n + 1]
        if (last != draft and draft != _UNKNOWN) or token_id < 0:
            return n
        last = token_id
        n += 1
    return n


def drawn_ids(draws: Sequence[Sampled]) -> list[int]:
    """Token ids of draws."""
    if type(draws) is Draws:  # an abstract class would be asked at length
        return draws.token_ids
    return [draw.token_id for draw in draws]


def known_tokens(row: Row, draws: Sequence[Sampled]) -> list[int]:
    """The row's tokens that are known once it has drawn: its own, accepted drafts, and the last one drawn. Without
    draws: its own."""
    tokens = list(unpack(row.token_ids))
    if draws:
        drawn = drawn_ids(draws)
        tokens += drawn[: 1 + n_accepted(drawn, row.draft_ids)]
    return tokens
