"""What operators do with cached KV: purge, export and import, on a thread of their own while the step loop runs."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, runtime_checkable

from emberline.kv.notice_queue import NoticeQueue
from emberline.kv.tiers.block_tag import BlockTagger
from emberline.kv.tiers.disk.direct_file import aligned_buffer
from emberline.kv.tiers.disk.disk_folder import purge_unused
from emberline.kv.tiers.export_file import read_export, write_export
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.tier import BlockId, BlockMeta, Tier, layout_tag
from emberline.protocol import block_hash
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import EmberlineError, Internal, NotFound, Unavailable, Unsupported
from emberline.protocol.frames import CacheCommand, CacheResult

BATCH = 16  # blocks that are exported or imported at once

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
        groups: Sequence[KVGroup] = (),
        tiers: GroupTiers | None = None,
        key: bytes | None = None,
        disk_path: Path | None = None,
        refusal: str | None = None,
    ) -> None:
        """refusal: why this worker exports and imports nothing; None: it does."""
        self._refusal = refusal
        self.fingerprint = fingerprint
        self._layouts = {layout_tag(group): group.block_bytes for group in groups}
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
        if self._refusal is not None:
            raise Unsupported(self._refusal)
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
        source: dict[BlockId, tuple[Tier, BlockMeta]] = {}
        for tier in tiers.all_tiers:
            if isinstance(tier, Exportable):
                for block_id, meta in tier.chains(owner, session):
                    source.setdefault(block_id, (tier, meta))
        if not source:
            raise NotFound("no block of this session is stored")
        ordered = sorted(
            ((block_id, meta) for block_id, (_, meta) in source.items()), key=lambda block: block[1].position
        )
        buffers: dict[bytes, list[memoryview]] = {
            tag: [aligned_buffer(n_bytes)[:n_bytes] for _ in range(BATCH)] for tag, n_bytes in self._layouts.items()
        }

        def read(ids: list[BlockId]) -> list[memoryview | None]:
            found: list[memoryview | None] = []
            for n, block_id in enumerate(ids):
                buffer = buffers[block_id.tag][n]
                good = source[block_id][0].read([block_id], [buffer])[0]
                found.append(buffer if good else None)
            return found

        n_blocks = write_export(path, tagger, self.fingerprint, owner, self._layouts, ordered, read, BATCH)
        return {"exported": n_blocks}

    def _import(self, tiers: GroupTiers, tagger: BlockTagger, owner: bytes, path: Path) -> dict[str, int]:
        n_blocks = 0
        targets = [tier for tier in tiers.all_tiers if not tier.remote]
        batch: list[tuple[BlockId, BlockMeta, memoryview]] = []

        def write() -> None:
            ids, metas, buffers = zip(*batch)
            for tier in targets:
                tier.write(ids, buffers, metas)
            batch.clear()

        try:
            for block in read_export(path, tagger, self.fingerprint, owner, self._layouts):
                batch.append(block)
                n_blocks += 1
                if len(batch) == BATCH:
                    write()
        finally:
            if batch:
                write()
        return {"imported": n_blocks}


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
