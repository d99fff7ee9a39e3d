"""A suffix index: finds where the last tokens of a sequence occurred before, and proposes what followed them there.

The index itself is C (`kernels/cpu/suffix_index.h`): a ring of tokens with two hash chains, over the last four and
the last token. Appending a token takes constant time, and an index never grows beyond its size. One thread at a time.
"""

import ctypes
import logging
import weakref
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from emberline.kernels.native_library import BuildError, library_path

MAX_MATCH = 64  # tokens of the context that are compared
MAX_DRAFT = 64
TOKEN_BYTES = 20  # of the ring and both chains
MIN_SIZE = 1024  # tokens
MAX_TOKENS = 2**32 - 2  # that one index can number
CONTEXT_BYTES = 4 * MAX_MATCH

_log = logging.getLogger(__name__)


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


_DRAFT_BYTES, _IDS, _CELLS = ctypes.sizeof(_Draft), _Draft.draft.offset, _Draft.cell.offset


class Continuation(NamedTuple):
    ids: bytes  # u32 LE
    probabilities: list[float]  # of all tokens up to each, by how often they followed; falling
    match_len: int  # tokens


@cache
def _native() -> Any:
    """Keeps the interpreter's lock: a call takes microseconds, and to get it back could take a switch interval."""
    try:
        lib = ctypes.PyDLL(str(library_path()))
    except (BuildError, OSError) as error:
        _log.warning("%s; no suffix decoding", error)
        return None
    lib.em_suffix_new.argtypes, lib.em_suffix_new.restype = [ctypes.c_uint64], ctypes.c_void_p
    lib.em_suffix_free.argtypes, lib.em_suffix_free.restype = [ctypes.c_void_p], None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    lib.em_suffix_extend.argtypes = [pointer, ctypes.c_char_p, number, ctypes.c_int32]
    lib.em_suffix_extend.restype = None
    lib.em_suffix_propose.argtypes = [pointer, ctypes.c_char_p, number, ctypes.c_char_p, pointer]
    lib.em_suffix_propose.restype = None
    return lib


def available() -> bool:
    """Whether this host could compile it."""
    return _native() is not None


class SuffixIndex:
    """The last `size` tokens of the texts appended to it. `n_bytes` is what it may take."""

    def __init__(self, n_tokens: int) -> None:
        self.size = max(MIN_SIZE, 1 << (n_tokens - 1).bit_length())
        self.n_tokens = 0  # appended so far
        self._lib = _native()
        address = self._lib.em_suffix_new(self.size)
        if not address:
            raise MemoryError(f"no memory for a suffix index of {self.size} tokens")
        self.address: int = address
        weakref.finalize(self, self._lib.em_suffix_free, address)

    @property
    def n_bytes(self) -> int:
        return TOKEN_BYTES * self.size

    def extend(self, ids: bytes, end: bool = False) -> None:
        """Append tokens (u32 LE) to the last text; `end`: that ends with them."""
        n = len(ids) // 4
        assert self.n_tokens + n < MAX_TOKENS, "positions are 32-bit numbers"
        self._lib.em_suffix_extend(self.address, ids, n, end)
        self.n_tokens += n + end


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
        self._make_room(1)

    def _make_room(self, n: int) -> None:
        self._drafts = (_Draft * n)()
        self._drafts_at = ctypes.addressof(self._drafts)
        self._raw = memoryview(self._drafts).cast("B")

    def propose(self, context: bytes | bytearray, most: int, *indexes: SuffixIndex) -> Continuation | None:
        """What followed the end of the context (u32 LE) before. The first index is preferred where both say as much."""
        addresses = [index.address for index in indexes] + [0] * (2 - len(indexes))
        context = bytes(context[-CONTEXT_BYTES:])
        ids = [ids for _, ids, _ in self.drafts([*addresses, len(context) >> 2, 0], [context], most)]
        found = self._drafts[0]
        return Continuation(ids[0], found.probability[: found.n], found.match) if ids else None

    def drafts(
        self, requests: list[int], contexts: Sequence[bytes | bytearray], most: int
    ) -> list[tuple[int, bytes, bytes]]:
        """Continue many contexts (u32 LE). requests: four numbers for each, see `suffix_request` in suffix_index.h.

        Returns, for each context that has a continuation, its place, up to `most` token ids and their cells, a byte
        each. One call into C for a step: it is made between two steps, while the device waits.
        """
        n = len(contexts)
        if n > len(self._drafts):
            self._make_room(2 * n)
        self._policy.most = most
        contexts_at = b"".join(contexts)
        self._lib.em_suffix_propose(self._policy_at, array("q", requests).tobytes(), n, contexts_at, self._drafts_at)
        raw, found = self._raw, []
        lengths = bytes(raw[: n * _DRAFT_BYTES : _DRAFT_BYTES])
        if lengths.count(0) < n:
            for place, k in enumerate(lengths):
                if k:
                    at = place * _DRAFT_BYTES
                    ids, cells = raw[at + _IDS : at + _IDS + 4 * k], raw[at + _CELLS : at + _CELLS + k]
                    found.append((place, bytes(ids), bytes(cells)))
        return found
