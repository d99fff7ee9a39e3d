"""Suffix decoding as it was before sequences were looked up by slot: its drafts are what the engine's must be."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Entry:
    index: SuffixIndex
    n_indexed: int = 0  # tokens of the sequence that were appended, or skipped
    used_step: int = 0


class ReferenceSuffixDrafter:
    """Looks up all sequences that a step may draft for in one call."""

    name = "suffix"

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._matcher = SuffixMatcher(match_cells=_MATCH_CELL, shares=_SHARES)
        self._entries: dict[int | bytes, _Entry] = {}  # by sequence number or tenant
        self._evicted: set[int] = set()  # sequences that have lost their index: it is not built again
        self._step = 0
        self._left = STEP_TOKENS  # to index in this step
        self.n_bytes = 0

    def propose(self, seqs: Many[Sequence], before: Mapping[int, Draft]) -> Iterable[tuple[Sequence, Draft]]:
        """Index what the sequences have gained, and propose what followed their last tokens before."""
        self._step = step = self._step + 1
        self._left = STEP_TOKENS
        entries, asked = self._entries, list[Sequence | None]()
        requests, contexts = list[int](), list[bytes | bytearray]()
        root_key, tenant = b"", 0  # those of the last one: most are of few tenants
        for seq in seqs:
            if (owner := seq.table.owner[0]) != root_key:
                root_key, tenant = owner, self._tenant(seq)
            ids = seq.ids
            context, address, n_new = ids[-CONTEXT_BYTES:], 0, 0
            if (entry := entries.get(seq.number) or self._of_sequence(seq)) is not None:
                index = entry.index
                address, entry.used_step = index.address, step
                n_new = (len(ids) >> 2) - entry.n_indexed
                if n_new > MAX_MATCH:
                    n_new = self._index(entry, seq)
                entry.n_indexed += n_new
                index.extend(bytes(ids[len(ids) - 4 * n_new :]))
            if before and (draft := before.get(seq.number)) is not None:  # one request indexes, the other looks up
                asked.append(None)
                requests += (address, tenant, len(context) >> 2)
                contexts.append(context)
                if draft.n_tokens >= MOST:
                    continue
                context = context + draft.ids
            asked.append(seq)
            requests += (address, tenant, len(context) >> 2)
            contexts.append(context)
        if not asked:
            return []
        found = self._matcher.drafts(requests, contexts, MOST)
        return [(asker, Draft(ids, cells)) for at, ids, cells in found if (asker := asked[at]) is not None]

    def prior(self, cell: int) -> float:
        return _PRIORS[cell // 3] * (1.0, 0.7, 0.4)[cell % 3]

    def ended(self, seq: Sequence) -> None:
        """Remember the reply of a sequence for its tenant."""
        self._drop(seq.number)
        self._evicted.discard(seq.number)
        n_output = min(seq.n_output, TENANT_TOKENS // 4)
        if not n_output or not seq.samples:
            return
        entry = self._entries.get(seq.root_key)
        if entry is not None and entry.index.n_tokens > MAX_TOKENS - TENANT_TOKENS:
            self._drop(seq.root_key)
            entry = None
        if entry is None:
            entry = self._allocate(seq.root_key, min(TENANT_TOKENS, self._most_tokens))
        if entry is not None:
            lead = LEAD_TOKENS if n_output == seq.n_output else 0
            entry.index.extend(bytes(seq.ids[-4 * (n_output + lead) :]), end=True)

    def forget(self, tenant: bytes) -> None:
        """Drop what is known of a tenant's earlier replies."""
        self._drop(tenant)

    @property
    def _most_tokens(self) -> int:
        """Largest number of tokens of one index: a quarter of the memory, as a power of two."""
        return 1 << max(10, (self._max_bytes // 4 // TOKEN_BYTES).bit_length() - 1)

    def _of_sequence(self, seq: Sequence) -> _Entry | None:
        if seq.number in self._evicted:
            return None
        n_tokens = min(seq.n_tokens + min(seq.n_output_left, REPLY_ROOM), self._most_tokens)
        entry = self._allocate(seq.number, n_tokens)
        if entry is None:
            self._evicted.add(seq.number)
        else:  # what the ring would drop again is left out
            entry.n_indexed = max(0, seq.n_tokens - entry.index.size)
        return entry

    def _tenant(self, seq: Sequence) -> int:
        """The address of its tenant's index; 0: there is none."""
        entry = self._entries.get(seq.root_key)
        if entry is None:
            return 0
        entry.used_step = self._step
        return entry.index.address

    def _index(self, entry: _Entry, seq: Sequence) -> int:
        """Index a prompt, as far as a step may. Returns the number of tokens left for the lookup to index."""
        n = min(seq.n_tokens - entry.n_indexed, self._left)
        if n > MAX_MATCH:
            entry.index.extend(bytes(memoryview(seq.ids)[4 * entry.n_indexed : 4 * (entry.n_indexed + n)]))
            entry.n_indexed += n
            self._left -= n
        n_left = seq.n_tokens - entry.n_indexed
        return n_left if n_left <= MAX_MATCH else 0  # the draft is from what is known

    def _allocate(self, key: int | bytes, n_tokens: int) -> _Entry | None:
        """None where the memory is taken by indexes that this step or the last one has used."""
        entry = _Entry(SuffixIndex(n_tokens), used_step=self._step)
        while self.n_bytes + entry.index.n_bytes > self._max_bytes:
            oldest = min(self._entries, key=lambda key: self._entries[key].used_step, default=None)
            if oldest is None or self._entries[oldest].used_step >= self._step - 1:
                return None
            self._drop(oldest)
            if isinstance(oldest, int):
                self._evicted.add(oldest)
        self._entries[key] = entry
        self.n_bytes += entry.index.n_bytes
        return entry

    def _drop(self, key: int | bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.n_bytes -= entry.index.n_bytes
