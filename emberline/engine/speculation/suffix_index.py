"""A suffix index: finds where the last tokens of a sequence occurred before, and proposes what followed them there.

The index itself is C (`kernels/cpu/suffix_index.h`): a ring of tokens with two hash chains, over the last four and
the last token. Appending a token takes constant time, and an index never grows beyond its size. One thread at a time.
"""

import ctypes
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from emberline.kernels.native_library import host_library

MAX_MATCH = 64  # tokens of the context that are compared
MAX_DRAFT = 64
TOKEN_BYTES = 20  # of the ring and both chains
MIN_SIZE = 1024  # tokens
MAX_TOKENS = 2**32 - 2  # that one index can number
CONTEXT_BYTES = 4 * MAX_MATCH


class _Policy(ctypes.Structure):
    """`suffix_policy` in suffix_index.h."""

    _fields_ = [
        ("most", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("min_probability", ctypes.c_float),
        ("shares", ctypes.c_float * 2),
        ("match_cell", ctypes.c_uint8 * (MAX_MATCH + MAX_DRAFT)),
    ]


class _Draft(ctypes.Structure):
    """`suffix_draft` in suffix_index.h."""

    _fields_ = [
        ("n", ctypes.c_uint8),
        ("match", ctypes.c_int32),
        ("draft", ctypes.c_uint32 * MAX_DRAFT),
        ("probability", ctypes.c_float * MAX_DRAFT),
        ("cell", ctypes.c_uint8 * MAX_DRAFT),
    ]


_LEFT = 255  # SUFFIX_LEFT in suffix_index.h
_N_TOKENS, _USED = 6, 7  # words of a `suffix_index` in suffix_index.h
Found = tuple[int, bytes, bytes]  # place of a context, ids that continue it (u32 LE), and their cells, one byte each
_DRAFT_BYTES, _IDS, _CELLS = ctypes.sizeof(_Draft), _Draft.draft.offset, _Draft.cell.offset


class Continuation(NamedTuple):
    """Tokens that followed a context before."""

    ids: bytes  # u32 LE
    probabilities: list[float]  # of all tokens up to each, by how often they followed; falling
    match_len: int  # tokens


@cache
def _native() -> Any:
    """The functions of suffix_index.h. Returns None if this host could not compile them."""
    if (lib := host_library()) is None:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.em_suffix_new.argtypes, lib.em_suffix_new.restype = [ctypes.c_uint64], pointer
    lib.em_suffix_free.argtypes, lib.em_suffix_free.restype = [pointer], None
    lib.em_suffix_extend.argtypes = [pointer, ctypes.c_char_p, number, ctypes.c_int32]
    lib.em_suffix_extend.restype = None
    lib.em_suffix_propose.argtypes = [pointer, ctypes.c_char_p, number, ctypes.c_char_p, pointer]
    lib.em_suffix_propose.restype = None
    lib.em_suffix_step.argtypes = [*[pointer] * 4, number, number, pointer]
    lib.em_suffix_step.restype = number
    return lib


def available() -> bool:
    """True if this host could compile it."""
    return _native() is not None


class SuffixIndex:
    """The last `size` tokens of the texts appended to it."""

    def __init__(self, n_tokens: int) -> None:
        self.size = max(MIN_SIZE, 1 << (n_tokens - 1).bit_length())
        self.n_skipped = 0  # leading tokens of the text that were left out
        self._lib = _native()
        address = self._lib.em_suffix_new(self.size)
        if not address:
            raise MemoryError(f"no memory for a suffix index of {self.size} tokens")
        self.address: int = address
        self._state = (ctypes.c_int64 * (_USED + 1)).from_address(address)
        weakref.finalize(self, self._lib.em_suffix_free, address)

    @property
    def n_bytes(self) -> int:
        """Bytes that the index may take."""
        return TOKEN_BYTES * self.size

    @property
    def n_tokens(self) -> int:
        """Number of tokens appended so far, ends of texts included."""
        return self._state[_N_TOKENS]

    @property
    def used_step(self) -> int:
        """Number of the last step that asked the index."""
        return self._state[_USED]

    @used_step.setter
    def used_step(self, step: int) -> None:
        self._state[_USED] = step

    def extend(self, ids: bytes, end: bool = False) -> None:
        """Append tokens (u32 LE) to the last text; `end`: that ends with them."""
        n = len(ids) // 4
        assert self.n_tokens + n < MAX_TOKENS, "positions are 32-bit numbers"
        self._lib.em_suffix_extend(self.address, ids, n, end)


class SuffixMatcher:
    """Asks up to two indexes for a continuation. Holds the buffers of the call.

    factor: a match of m tokens is continued by factor · m tokens at most. A draft ends where less than
    min_probability of the occurrences went on like it. match_cells: the first of three cells of a token, by the length
    of the match before it; shares: of the occurrences that go on like this, below which it is the second, the third.
    """

    def __init__(
        self,
        factor: float = 2.0,
        min_probability: float = 0.2,
        match_cells: Sequence[int] = (0,) * (MAX_MATCH + MAX_DRAFT),
        shares: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._lib = _native()
        self._policy = _Policy(
            factor=factor,
            min_probability=min_probability,
            match_cell=(ctypes.c_uint8 * (MAX_MATCH + MAX_DRAFT))(*match_cells),
            shares=(ctypes.c_float * 2)(*shares),
        )
        self._policy_at = ctypes.addressof(self._policy)
        self._drafts = (_Draft * 0)()
        self._make_room(1, 0)

    def _make_room(self, n: int, most: int) -> None:
        """Prepare the buffers for n drafts of up to `most` tokens."""
        self._policy.most = most
        if n > len(self._drafts):
            self._drafts = (_Draft * (2 * n))()
            self._drafts_at = ctypes.addressof(self._drafts)
            self._raw = memoryview(self._drafts).cast("B")

    def propose(self, context: bytes | bytearray, most: int, *indexes: SuffixIndex) -> Continuation | None:
        """Find what followed the end of the context (u32 LE) before. The first index wins where both say as much."""
        addresses = [index.address for index in indexes] + [0] * (2 - len(indexes))
        context = bytes(context[-CONTEXT_BYTES:])
        ids = [ids for _, ids, _ in self.drafts([*addresses, len(context) >> 2], [context], most)]
        found = self._drafts[0]
        return Continuation(ids[0], found.probability[: found.n], found.match) if ids else None

    def drafts(self, requests: list[int], contexts: Sequence[bytes | bytearray], most: int) -> list[Found]:
        """Continue many contexts (u32 LE). requests: three numbers for each, see `suffix_request` in suffix_index.h.

        Returns, for each context that has a continuation, its place, up to `most` token ids and their cells, a byte
        each. One call into C for a step: it is made between two steps, while the device waits.
        """
        n = len(contexts)
        self._make_room(n, most)
        contexts_at = b"".join(contexts)
        self._lib.em_suffix_propose(self._policy_at, array("q", requests).tobytes(), n, contexts_at, self._drafts_at)
        return self._found(n)

    def step(self, table_at: int, rows_at: int, slots_at: int, n: int, step: int, most: int) -> list[Found]:
        """Continue the sequences of n slots that have gained one token, or none, since the step before.

        table_at, rows_at, slots_at: addresses of `suffix_slot` by slot, of the `row_table` and of the slots. Sequences
        that are left to `drafts` are among the results, without ids.
        """
        self._make_room(n, most)
        n_found = self._lib.em_suffix_step(self._policy_at, table_at, rows_at, slots_at, n, step, self._drafts_at)
        return self._found(n) if n_found else []

    def _found(self, n: int) -> list[Found]:
        """Drafts among the first n, and what the caller has to look at."""
        raw, found = self._raw, []
        for place, k in enumerate(bytes(raw[: n * _DRAFT_BYTES : _DRAFT_BYTES])):
            if k == _LEFT:
                found.append((place, b"", b""))
            elif k:
                at = place * _DRAFT_BYTES
                ids, cells = raw[at + _IDS : at + _IDS + 4 * k], raw[at + _CELLS : at + _CELLS + k]
                found.append((place, bytes(ids), bytes(cells)))
        return found
