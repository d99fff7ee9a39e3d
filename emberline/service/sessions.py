"""Sessions: the exact token ids of conversations, per account, found by the digests of their messages.

Every turn of a conversation begins with the turns before it, so ids are stored in blocks that entries share: a
conversation of n tokens costs n ids, not n per turn. Eviction is least recently used first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from emberline.cluster.prefix_push import RecentConversation
from emberline.text.prompt import KnownPrefix, PrefixCut

DEFAULT_BYTES = 64 << 20
BLOCK_BYTES = 4 << 10  # 1,024 ids
ENTRY_BYTES = 512  # of an entry without its blocks, roughly
MAX_SCANNED = 8  # entries, for each conversation that is asked for: every turn has one
_REFERENCE_BYTES = 8

Key = tuple[str, str, bytes]  # account, model, digest of the messages


class SessionOwner(NamedTuple):
    """To whom cached KV of a conversation belongs."""

    salt: bytes = b""  # of the account
    session: str | None = None  # the client's id of the conversation


NO_OWNER = SessionOwner()


class _Entry:
    __slots__ = ("blocks", "cut", "owner")

    def __init__(self, blocks: tuple[bytes, ...], cut: PrefixCut, owner: SessionOwner) -> None:
        self.blocks = blocks
        self.cut = cut
        self.owner = owner

    @property
    def n_bytes(self) -> int:
        """Size without the blocks, which are counted once however many entries share them."""
        return ENTRY_BYTES + _REFERENCE_BYTES * len(self.blocks)

    def is_prefix_of(self, other: "_Entry") -> bool:
        if self.cut.n_ids > other.cut.n_ids or self.cut.text_len > other.cut.text_len:
            return False
        last = len(self.blocks) - 1
        return self.blocks[:last] == other.blocks[:last] and other.blocks[last].startswith(self.blocks[last])


def _longest(entries: list[tuple[Key, _Entry]], model: str, most: int) -> list[RecentConversation]:
    found: dict[str, list[_Entry]] = {}  # by account
    conversations: list[RecentConversation] = []
    for (account, version, _), entry in entries:
        known = found.setdefault(account, [])
        if version != model or any(entry.is_prefix_of(other) for other in known):
            continue
        known.append(entry)
        conversations.append(RecentConversation(entry.blocks, *entry.owner))
        if len(conversations) == most:
            break
    return conversations


class Sessions:
    """Used from one thread. `model` names the exact version of a model: ids are valid for no other."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()  # least recently used first
        self._blocks: dict[bytes, tuple[bytes, int]] = {}  # the one copy of each, and how many entries share it

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, account: str, model: str, digests: Sequence[bytes]) -> KnownPrefix | None:
        """The longest known prefix of the conversation whose messages have these digests, oldest message first.

        Its cuts are the ends of all known shorter prefixes: a template may render a turn differently once another
        follows, and then the ids before it are still valid.
        """
        keys = [(account, model, digest) for digest in digests]
        found = [(key, entry) for key in keys if (entry := self._entries.get(key)) is not None]
        if not found:
            return None
        longest = found[-1][1]
        for key, _ in found:
            self._entries.move_to_end(key)
        cuts = tuple(entry.cut for _, entry in found if entry.is_prefix_of(longest))
        return KnownPrefix(b"".join(longest.blocks), cuts)

    def recent(self, model: str, most: int) -> Callable[[], list[RecentConversation]]:
        """Return a function that lists recent conversations of all accounts, newest first, skipping prefixes of others.

        The function is slow: call it in a thread."""
        return partial(_longest, list(islice(reversed(self._entries.items()), most * MAX_SCANNED)), model, most)

    def add(
        self,
        account: str,
        model: str,
        digest: bytes,
        ids: bytes,
        text_len: int,
        text_digest: bytes,
        owner: SessionOwner = NO_OWNER,
    ) -> None:
        """`ids` encode the first `text_len` characters of the conversation that has this digest."""
        assert len(ids) % 4 == 0
        if not ids or len(ids) + ENTRY_BYTES > self.max_bytes:
            return
        key = (account, model, digest)
        if key in self._entries:
            self._remove(key)
        blocks = tuple([self._hold(ids[at : at + BLOCK_BYTES]) for at in range(0, len(ids), BLOCK_BYTES)])
        entry = self._entries[key] = _Entry(blocks, PrefixCut(len(ids) // 4, text_len, text_digest), owner)
        self.n_bytes += entry.n_bytes
        while self.n_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))

    def purge(self, account: str | None, session: str | None = None) -> int:
        """Forget the conversations of an account, those of one of its sessions, or (None) all. Returns how many
        entries."""
        found = [
            key
            for key, entry in self._entries.items()
            if account in (None, key[0]) and session in (None, entry.owner.session)
        ]
        for key in found:
            self._remove(key)
        return len(found)

    def _remove(self, key: Key) -> None:
        entry = self._entries.pop(key)
        self.n_bytes -= entry.n_bytes
        for block in entry.blocks:
            self._release(block)

    def _hold(self, block: bytes) -> bytes:
        shared, n_held = self._blocks.get(block, (block, 0))
        if not n_held:
            self.n_bytes += len(block)
        self._blocks[shared] = (shared, n_held + 1)
        return shared

    def _release(self, block: bytes) -> None:
        shared, n_held = self._blocks[block]
        if n_held > 1:
            self._blocks[shared] = (shared, n_held - 1)
        else:
            del self._blocks[shared]
            self.n_bytes -= len(block)
