"""Suffix decoding: what followed the last tokens before, in the sequence itself or in earlier replies of its tenant.

Agents repeat themselves: files they edit, diffs, JSON, commands. A sequence has an index over its prompt and reply, a
tenant one over its recent replies. A tenant is the root of the content keys: the model and the account's salt, as for
the prefix cache, so nothing is ever proposed across accounts. Indexes are bounded in bytes together, and the least
recently used ones go first. Indexing a long prompt is spread over steps.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many

import numpy as np

from emberline.engine.core.queues import Selection
from emberline.engine.core.sequence import Sequence
from emberline.engine.speculation.drafter import MOST, Draft
from emberline.engine.speculation.suffix_index import (
    CONTEXT_BYTES,
    MAX_DRAFT,
    MAX_MATCH,
    MAX_TOKENS,
    TOKEN_BYTES,
    SuffixIndex,
    SuffixMatcher,
)

DEFAULT_BYTES = 64 << 20
STEP_TOKENS = 8192  # of prompts that a step indexes, of all sequences: about 0.4 ms
TENANT_TOKENS = 1 << 17
REPLY_ROOM = 4096  # tokens that an index has for the reply; a longer one displaces the begin of the prompt
LEAD_TOKENS = 16  # of the prompt before a reply, so that the first tokens of a reply have something to match

_MATCHES = (1, 2, 3, 4, 6, 8, 16, 32)  # lower bounds of the match lengths that are told apart
_SHARES = (0.99, 0.6)  # of the occurrences that go on like this, above which a token is another cell
_MATCH_CELL = [3 * (sum(at >= bound for bound in _MATCHES) - 1) for at in range(MAX_MATCH + MAX_DRAFT)]
_PRIORS = (0.25, 0.45, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)  # where all occurrences agree; by match length


_NUMBER, _OWN, _TENANT = range(3)  # of a row of the table by slot


class SuffixDrafter:
    """Looks up all sequences that a step may draft for in one call."""

    name = "suffix"

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._matcher = SuffixMatcher(match_cells=_MATCH_CELL, shares=_SHARES)
        self._indexes: dict[int | bytes, SuffixIndex] = {}  # by sequence number or tenant
        self._evicted: set[int] = set()  # sequences that have lost their index: it is not built again
        self._table = np.zeros((0, 4), np.int64)  # by slot: the sequence and its indexes, `suffix_slot` in C
        self._table_at = 0
        self._step = 0
        self._left = STEP_TOKENS  # to index in this step
        self.n_bytes = 0

    def propose(self, seqs: Selection, before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Index what the sequences have gained, and propose what followed their last tokens before."""
        self._step += 1
        self._left = STEP_TOKENS
        if len(self._table) < seqs.rows.n_slots:
            self._table = np.full((seqs.rows.n_slots, 4), -1, np.int64)
            self._table_at = self._table.ctypes.data
        for seq in seqs if before else ():
            if seq.number in before:
                self._table[seq.slot, _NUMBER] = -1
        found = self._matcher.step(
            self._table_at, seqs.rows.address, seqs.slots.ctypes.data, len(seqs), self._step, MOST
        )
        left = [seqs[place] for place, ids, _ in found if not ids]
        drafts = [(seqs[place], Draft(ids, cells)) for place, ids, cells in found if ids]
        return [*drafts, *self._propose_each(left, before)] if left else drafts

    def _propose_each(self, seqs: Many[Sequence], before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Do the same for sequences that the step before has not asked for, that have gained several tokens, have no
        index of their own, or for which another drafter proposes something."""
        asked, requests, contexts = list[Sequence](), list[int](), list[bytes | bytearray]()
        for seq in seqs:
            tenant, index = self._tenant(seq), self._indexes.get(seq.number) or self._of_sequence(seq)
            if index is not None:
                index.used_step = self._step
                self._index(index, seq)
                self._table[seq.slot] = seq.number, index.address, tenant, index.n_skipped
            draft = before.get(seq.number)
            if draft is None or draft.n_tokens < MOST:
                contexts.append(seq.ids[-CONTEXT_BYTES:] + (b"" if draft is None else draft.ids))
                requests += (0 if index is None else index.address, tenant, len(contexts[-1]) >> 2)
                asked.append(seq)
        found = self._matcher.drafts(requests, contexts, MOST)
        return [(asked[place], Draft(ids, cells)) for place, ids, cells in found]

    def prior(self, cell: int) -> float:
        """Probability that a token of a cell is drawn, by match length and agreement."""
        return _PRIORS[cell // 3] * (1.0, 0.7, 0.4)[cell % 3]

    def ended(self, seq: Sequence) -> None:
        """Remember the reply of a sequence for its tenant."""
        self._drop(seq.number)
        self._evicted.discard(seq.number)
        n_output = min(seq.n_output, TENANT_TOKENS // 4)
        if not n_output or not seq.samples:
            return
        index = self._indexes.get(seq.root_key)
        if index is not None and index.n_tokens > MAX_TOKENS - TENANT_TOKENS:
            self._drop(seq.root_key)
            index = None
        if index is None:
            if (index := self._allocate(seq.root_key, min(TENANT_TOKENS, self._most_tokens))) is None:
                return
            self._table[self._table[:, _TENANT] == 0, _NUMBER] = -1  # those of this tenant learn of it
        lead = LEAD_TOKENS if n_output == seq.n_output else 0
        index.extend(bytes(seq.ids[-4 * (n_output + lead) :]), end=True)

    def forget(self, tenant: bytes | None) -> None:
        """Drop what is known of a tenant's earlier replies, or (None) of those of all."""
        for key in [key for key in self._indexes if isinstance(key, bytes) and tenant in (key, None)]:
            self._drop(key)

    @property
    def _most_tokens(self) -> int:
        """Largest number of tokens of one index: a quarter of the memory, as a power of two."""
        return 1 << max(10, (self._max_bytes // 4 // TOKEN_BYTES).bit_length() - 1)

    def _of_sequence(self, seq: Sequence) -> SuffixIndex | None:
        """A new index for a sequence. Returns None if there is no room, or the sequence has lost its index before."""
        if seq.number in self._evicted:
            return None
        index = self._allocate(seq.number, min(seq.n_tokens + min(seq.n_output_left, REPLY_ROOM), self._most_tokens))
        if index is None:
            self._evicted.add(seq.number)
        else:  # what the ring would drop again is left out
            index.n_skipped = max(0, seq.n_tokens - index.size)
        return index

    def _tenant(self, seq: Sequence) -> int:
        """The address of its tenant's index; 0: there is none."""
        index = self._indexes.get(seq.root_key)
        if index is None:
            return 0
        index.used_step = self._step
        return index.address

    def _index(self, index: SuffixIndex, seq: Sequence) -> None:
        """Index the tokens that a sequence has gained; of a long prompt as many as a step may."""
        first = index.n_skipped + index.n_tokens
        n = seq.n_tokens - first
        if n > MAX_MATCH:
            allowed = min(n, self._left) if self._left > MAX_MATCH else 0
            self._left -= allowed
            n = n if n - allowed <= MAX_MATCH else allowed
        if n:
            index.extend(bytes(memoryview(seq.ids)[4 * first : 4 * (first + n)]))

    def _allocate(self, key: int | bytes, n_tokens: int) -> SuffixIndex | None:
        """A new index. Returns None if the memory is taken by indexes that this step or the last one has used."""
        index = SuffixIndex(n_tokens)
        index.used_step = self._step
        while self.n_bytes + index.n_bytes > self._max_bytes:
            oldest = min(self._indexes, key=lambda key: self._indexes[key].used_step, default=None)
            if oldest is None or self._indexes[oldest].used_step >= self._step - 1:
                return None
            self._drop(oldest)
            if isinstance(oldest, int):
                self._evicted.add(oldest)
        self._indexes[key] = index
        self.n_bytes += index.n_bytes
        return index

    def _drop(self, key: int | bytes) -> None:
        """Forget an index, whose memory is freed."""
        index = self._indexes.pop(key, None)
        if index is not None:
            self.n_bytes -= index.n_bytes
            self._table[(self._table[:, _OWN : _TENANT + 1] == index.address).any(1), _NUMBER] = -1
