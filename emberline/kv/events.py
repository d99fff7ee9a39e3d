"""What the prefix cache holds, told to those who watch: a snapshot first, then what each step changed."""

from collections.abc import Iterable, Iterator

from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import KVEvents

KEYS_PER_FRAME = 60_000  # frames stay below 1 MB


class EventLog:
    """A KVListener that nets out what happened since it was last asked.

    Content is told by the keys of one group, the one that sees everything: without it there is no hit.
    """

    def __init__(self, group: KVGroup) -> None:
        self._group = group
        self._stored: dict[bytes, None] = {}  # in order
        self._removed: dict[bytes, None] = {}

    def stored(self, group: KVGroup, key: bytes, block: int) -> None:
        if group is self._group:
            if key in self._removed:
                del self._removed[key]
            else:
                self._stored[key] = None

    def evicted(self, group: KVGroup, key: bytes, block: int) -> None:
        if group is self._group:
            if key in self._stored:
                del self._stored[key]
            else:
                self._removed[key] = None

    def take(self) -> list[KVEvents]:
        """What changed since the last call; mostly one frame, or none."""
        stored, self._stored = self._stored, {}
        removed, self._removed = self._removed, {}
        frames = [KVEvents(removed=part) for part in _parts(removed)]
        return frames + [KVEvents(stored=part) for part in _parts(stored)]


def snapshot(keys: Iterable[bytes]) -> list[KVEvents]:
    """All there is. The first frame says that it begins anew, the others add to it."""
    first, *others = list(_parts(keys)) or [b""]
    return [KVEvents(stored=first, whole=True), *(KVEvents(stored=part) for part in others)]


def watched_group(groups: Iterable[KVGroup]) -> KVGroup:
    """The one that sees everything, where there is one."""
    known = list(groups)
    return next((group for group in known if group.window is None), known[0])


def _parts(keys: Iterable[bytes]) -> Iterator[bytes]:
    known = list(keys)
    for start in range(0, len(known), KEYS_PER_FRAME):
        yield b"".join(known[start : start + KEYS_PER_FRAME])
