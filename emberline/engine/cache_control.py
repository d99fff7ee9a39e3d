"""Operators' actions on cached KV: purge, export and import, on a thread of their own while the step loop runs."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.disk.disk_folder import purge_unused
from emberline.kv.tiers.export_file import read_export, write_export
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.orders import GroupKey, WholeBlock
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol import block_hash
from emberline.protocol.errors import EmberlineError, Internal, NotFound, Unavailable, Unsupported
from emberline.protocol.frames import CacheCommand, CacheResult

BATCH_BYTES = 4 << 20  # exported or imported at once: they travel between the ranks of a group

_log = logging.getLogger(__name__)

Reply = Callable[[CacheResult], None]


@runtime_checkable
class Exportable(Protocol):
    """A tier that knows which blocks it holds of whom."""

    def chains(self, owner: bytes, session: bytes | None) -> list[tuple[BlockId, BlockMeta]]: ...


class StoredCache:
    """The tiers of a worker, and what exports need to know: its model, layouts and tagging key."""

    def __init__(
        self,
        fingerprint: str,
        tiers: GroupTiers | None = None,
        key: bytes | None = None,
        disk_path: Path | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self._tiers = tiers
        self._tagger = None if key is None else BlockTagger(key)
        self._disk_path = disk_path

    def run(self, command: CacheCommand) -> dict[str, int]:
        """The number of blocks by tier. EmberlineError, or OSError of a tier."""
        session = command.session or None
        owner = None if command.salt is None else block_hash.root(self.fingerprint, command.salt)
        if command.action == "purge":
            return self._purge(owner, session, command.salt)
        if self._tiers is None or self._tagger is None:
            raise Unsupported(
                "this worker keeps KV in its device pool alone: start the server with --kv-disk-bytes or "
                "--kv-host-bytes"
            )
        assert owner is not None, "exports belong to an account"
        if command.action == "export":
            return self._export(self._tiers, self._tagger, owner, session, Path(command.path))
        return self._import(self._tiers, self._tagger, owner, Path(command.path))

    def _purge(self, owner: bytes | None, session: bytes | None, salt: bytes | None) -> dict[str, int]:
        purged = {} if self._tiers is None else self._tiers.purge(owner, session)
        if self._disk_path is not None:
            purged["unused"] = purge_unused(self._disk_path, salt, session)
        return purged

    def _export(
        self, tiers: GroupTiers, tagger: BlockTagger, owner: bytes, session: bytes | None, path: Path
    ) -> dict[str, int]:
        tiers.flush()
        own = tiers.own.layouts  # rank 0 knows all blocks, and has its slices of them
        stored, elsewhere = list(map(layout_tag, own)), [g for g, group in enumerate(own) if not group.block_bytes]
        found: dict[GroupKey, BlockMeta] = {}
        for tier in tiers.own.all_tiers:
            if isinstance(tier, Exportable):
                for block_id, meta in tier.chains(owner, session):
                    for group in (stored.index(block_id.tag), *elsewhere):
                        found.setdefault((group, block_id.key), meta)
        if not found:
            raise NotFound("no block of this session is stored")
        tags = list(map(layout_tag, tiers.own.whole))
        ordered = sorted(
            ((BlockId(key, tags[group]), meta) for (group, key), meta in found.items()),
            key=lambda block: block[1].position,
        )

        def read(ids: list[BlockId]) -> list[bytes | None]:
            return tiers.read([(tags.index(block_id.tag), block_id.key) for block_id in ids])

        layouts, batch = _layouts(tiers), _batch(tiers)
        return {"exported": write_export(path, tagger, self.fingerprint, owner, layouts, ordered, read, batch)}

    def _import(self, tiers: GroupTiers, tagger: BlockTagger, owner: bytes, path: Path) -> dict[str, int]:
        n_blocks, size = 0, _batch(tiers)
        tags = list(map(layout_tag, tiers.own.whole))
        batch: list[WholeBlock] = []
        try:
            for block_id, meta, data in read_export(path, tagger, self.fingerprint, owner, _layouts(tiers)):
                batch.append(WholeBlock(tags.index(block_id.tag), block_id.key, meta, data))
                n_blocks += 1
                if len(batch) == size:
                    tiers.write(batch)
                    batch = []
        finally:
            if batch:
                tiers.write(batch)
        return {"imported": n_blocks}


def _layouts(tiers: GroupTiers) -> dict[bytes, int]:
    """Layout tags of blocks that are not divided, and their bytes."""
    return {layout_tag(group): group.block_bytes for group in tiers.own.whole}


def _batch(tiers: GroupTiers) -> int:
    """Number of blocks that are exported or imported at once."""
    return max(1, BATCH_BYTES // max(group.block_bytes for group in tiers.own.whole))


class CacheControl:
    """Used by the step loop's thread, which `wakeup` wakes when a command is done."""

    def __init__(self, stored: StoredCache, purge_device: Callable[[bytes | None, bytes], int] | None = None) -> None:
        """`purge_device` forgets what the device pool has cached of an owner and a session; called by this thread."""
        self._stored = stored
        self._purge_device = purge_device or (lambda owner, session: 0)
        self._commands: SimpleQueue[tuple[CacheCommand, Reply, int]] = SimpleQueue()
        self._done: NoticeQueue[tuple[CacheCommand, Reply, CacheResult]] = NoticeQueue()
        self._thread: threading.Thread | None = None
        self.wakeup = self._done.wakeup

    def submit(self, command: CacheCommand, reply: Reply) -> None:
        """`reply` is called once, by `finish`."""
        n_blocks = self._forget(command)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kv-control", daemon=True)
            self._thread.start()
        self._commands.put((command, reply, n_blocks))

    def finish(self) -> None:
        """Reply to commands that are done."""
        for command, reply, result in self._done.take():
            self._forget(command)  # what a fetch that had begun has brought back
            reply(result)

    def _forget(self, command: CacheCommand) -> int:
        if command.action != "purge":
            return 0
        owner = None if command.salt is None else block_hash.root(self._stored.fingerprint, command.salt)
        return self._purge_device(owner, command.session)

    def _work(self) -> None:
        while True:
            command, reply, n_blocks = self._commands.get()
            device = {"device": n_blocks} if command.action == "purge" else {}
            result = CacheResult(command.number, device)
            try:
                result.blocks |= self._stored.run(command)
            except EmberlineError as error:
                result.error = error.info()
            except OSError as error:
                message = f"the KV cache on disk: {error.strerror or error}; something may be left: repeat it later"
                result.error = Unavailable(message).info()
            except Exception:
                _log.exception("a command on the KV cache failed")
                result.error = Internal("the command failed; the worker's log has the reason").info()
            self._done.put((command, reply, result))
