"""KV events: what the device pool and each tier gain and lose, for the routers of requests."""

import threading
from collections.abc import Callable, Iterable, Sequence

from emberline.kv.cache import KVCache
from emberline.kv.groups import counted_group
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.frames import KVEvents

KEYS_PER_FRAME = 60_000  # frames stay below 1 MB

Id = tuple[bytes, bytes]  # a `tier.BlockId`: content key and layout tag
_DEVICE = b""  # in place of the tag, of blocks in the device pool


class TierChanges:
    """The net change of one tier between two calls of `take`, while somebody wants to know. Blocks of one layout are
    told: a prompt that has those has the others.

    The tier calls `stored`, `removed` and `reset` from any thread; `wake` is called at the first change after a `take`.
    """

    def __init__(self, tier: str, tag: bytes, held: Callable[[], Iterable[Id]], wake: Callable[[], None]) -> None:
        self._tier, self._tag, self._held, self._wake = tier, tag, held, wake
        self._lock = threading.Lock()  # guards what follows
        self._stored: dict[bytes, None] = {}  # in order
        self._removed: dict[bytes, None] = {}
        self._watched = self._reset = False

    def stored(self, ids: Iterable[Id]) -> None:
        self._note(ids, self._stored, self._removed)

    def removed(self, ids: Iterable[Id]) -> None:
        self._note(ids, self._removed, self._stored)

    def reset(self) -> None:
        """The tier holds something else altogether: all of it is told anew."""
        with self._lock:
            self._reset = self._watched
        self._wake()

    def watch(self) -> list[KVEvents]:
        """Blocks that the tier holds. From now on `take` returns the changes, of which some may be included here."""
        with self._lock:
            self._watched, self._reset = True, False
        first, *others = _frames_of([key for key, tag in self._held() if tag == self._tag]) or [b""]
        whole = KVEvents(stored=first, whole=True, tier=self._tier)
        return [whole, *(KVEvents(stored=part, tier=self._tier) for part in others)]

    def unwatch(self) -> None:
        with self._lock:
            self._watched = self._reset = False
            self._stored.clear()
            self._removed.clear()

    def take(self) -> list[KVEvents]:
        if not (self._stored or self._removed or self._reset):
            return []
        with self._lock:
            stored, removed, reset = list(self._stored), list(self._removed), self._reset
            self._stored.clear()
            self._removed.clear()
        if reset:
            return self.watch()
        frames = [KVEvents(removed=part, tier=self._tier) for part in _frames_of(removed)]
        return frames + [KVEvents(stored=part, tier=self._tier) for part in _frames_of(stored)]

    def _note(self, ids: Iterable[Id], noted: dict[bytes, None], opposite: dict[bytes, None]) -> None:
        if not self._watched:
            return
        with self._lock:
            was_empty = not self._stored and not self._removed
            for key, tag in ids:
                if tag != self._tag:
                    continue
                if key in opposite:
                    del opposite[key]
                else:
                    noted[key] = None
            wakes = was_empty and bool(noted)
        if wakes:
            self._wake()


def _frames_of(keys: list[bytes]) -> list[bytes]:
    return [b"".join(keys[start : start + KEYS_PER_FRAME]) for start in range(0, len(keys), KEYS_PER_FRAME)]


class KVEventFeed:
    """The KV events of a cache and of the tiers below it, collected while there is a subscriber: the net change between
    two calls of `take`.

    Content is reported by the keys of one group, without which there is no prefix hit (`counted_group`).
    """

    def __init__(self, cache: KVCache, tiers: Sequence[TierChanges] = ()) -> None:
        self._cache = cache
        self._group = counted_group(group.layout for group in cache.groups)
        self._device = TierChanges("", _DEVICE, self._held, lambda: None)
        self._sources = [self._device, *tiers]
        self._subscribed = False

    def _held(self) -> list[Id]:
        index = next(group.index for group in self._cache.groups if group.layout is self._group)
        return [(key, _DEVICE) for key in index]

    def subscribe(self) -> list[KVEvents]:
        """Return the content of the cache and of the tiers; from now on `take` returns the changes."""
        if not self._subscribed:
            self._subscribed = True
            self._cache.add_listener(self)
        return [event for source in self._sources for event in source.watch()]

    def unsubscribe(self) -> None:
        """Collect no changes any more."""
        self._cache.remove_listener(self)
        self._subscribed = False
        for source in self._sources:
            source.unwatch()

    def stored(self, group: KVGroup, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Take note of what the device pool has gained."""
        if group is self._group:
            self._device.stored((key, _DEVICE) for key in keys)

    def evicted(self, group: KVGroup, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Take note of what the device pool has lost."""
        if group is self._group:
            self._device.removed((key, _DEVICE) for key in keys)

    def take(self) -> list[KVEvents]:
        """Return the changes since the last call; mostly one frame, or none."""
        return [event for source in self._sources for event in source.take()]
