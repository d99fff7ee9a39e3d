"""Reads of blocks from block files: many at once, with what a bad drive or a bad block means for the tier."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from emberline.kv.tiers.disk.block_file import BlockFile, SlotRun
from emberline.kv.tiers.disk.direct_file import IoThreads
from emberline.kv.tiers.disk.drive_health import DriveHealth
from emberline.kv.tiers.tier import BlockId

READ_THREADS = 8
WARN_S = 60.0  # between two warnings about damaged blocks

_log = logging.getLogger(__name__)


class BlockReader:
    """Reads for any thread. The caller has asked `health` whether the drive may be used."""

    def __init__(self, health: DriveHealth) -> None:
        self._health = health
        self._threads = IoThreads(READ_THREADS - 1, "kv-disk-read")  # the caller is one more
        self._warn_s = 0.0

    def read(
        self,
        file_of: Callable[[bytes, bytes], BlockFile | None],
        ids: Sequence[BlockId],
        buffers: Sequence[memoryview],
    ) -> list[bool]:
        """Fill the buffers from the files that `file_of` names for a key and a layout tag. Returns when the drive has
        answered: until then the buffers are in use."""
        found = [False] * len(ids)
        wanted: dict[BlockFile, list[tuple[int, bytes, memoryview]]] = {}
        for at, ((key, tag), buffer) in enumerate(zip(ids, buffers)):
            if (file := file_of(key, tag)) is not None:
                wanted.setdefault(file, []).append((at, key, buffer.cast("B")))
        located = [(file, run) for file, blocks in wanted.items() for run in file.located(blocks)]
        self._threads.run_all([partial(self._read_run, file, run, found) for file, run in located])
        return found

    def close(self) -> None:
        """End the threads once they have read what was asked for."""
        self._threads.close()

    def _read_run(self, file: BlockFile, run: SlotRun, found: list[bool]) -> None:
        try:
            with self._health.call():
                verified = file.read(run)
        except OSError:
            try:
                file.remove(run.keys)
            except OSError as error:
                self._health.failed(error)
            return
        for at, good in zip(run.at, verified):
            found[at] = good
        if not all(verified) and time.monotonic() >= self._warn_s:
            self._warn_s = time.monotonic() + WARN_S
            _log.warning("blocks of the KV cache on disk did not verify and are recomputed (%s)", file.file.path)
