"""The tiers that a worker is started with: its flags, and the threads and files behind them."""

import argparse
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from emberline.engine.cache_control import StoredCache
from emberline.engine.memory import default_host_tier_bytes, free_host_bytes, n_gpus_of_machine
from emberline.kv.slices import whole
from emberline.kv.tiers.disk.block_cipher import CipherUnavailable, derived_key
from emberline.kv.tiers.disk.disk_folder import folders_of_other_groups, model_folder
from emberline.kv.tiers.disk.disk_tier import DiskTier, slot_bytes
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import HostTier, Segment, padded
from emberline.kv.tiers.manager import SAVING_BYTES, TierManager
from emberline.kv.tiers.mover import BlockMover
from emberline.kv.tiers.pool.pool_tier import open_pool
from emberline.kv.tiers.pool.resliced_pool import ReslicedPool
from emberline.kv.tiers.tier import Tier
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput
from emberline.protocol.kv_store import StoreSettings

KEY_VARIABLE = "EMBERLINE_KV_KEY"
STAGE_BYTES = 256 << 20
MIN_STAGED_BLOCKS = 16
SPARED_BYTES = 4 << 30  # of host memory that a tier of the default size leaves free
HOST_RATE, PINNED_RATE = 4e9, 25e9  # bytes per second of copies to the device pool, until they are measured

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--kv-host-bytes",
        type=_size,
        metavar="N",
        help="KV cache in host memory, below a GPU's; default: a share of it",
    )
    add("--kv-disk-bytes", type=_size, default=0, metavar="N", help="KV cache on disk, below that; default: none")
    add("--kv-disk-path", type=Path, metavar="DIR", help="where; the key of its blocks' tags is in " + KEY_VARIABLE)
    add("--kv-disk-encrypt", action="store_true", help="encrypt the blocks there, under a key derived from that one")
    add("--kv-store", type=StoreSettings.parse, metavar="URL", help="the cluster's KV pool: mooncake://HOST:PORT")


def open_tiers(
    args: argparse.Namespace,
    fingerprint: str,
    layouts: Sequence[KVGroup],
    mover: BlockMover,
    allocate: Callable[[int], Segment] | None = None,
    ranks: Sequence[Sequence[KVGroup]] = (),
    default_bytes: int | None = None,
    stage_bytes: int = STAGE_BYTES,
    free_bytes: Callable[[], int] = free_host_bytes,
) -> TierManager | None:
    """Open the tiers that the flags ask for, and a GPU's host tier. Returns None if there are none. Raises BadInput if
    a tier cannot be opened.

    allocate: pinned memory for a GPU.
    ranks: slices that each of several ranks has of a block. Each rank has a part of what the worker was given, in which
    there is room for as many blocks as on the others: what one evicts, all do.
    default_bytes: size of the host tier that no flag gives; None: `default_host_tier_bytes`.
    stage_bytes: host memory for blocks on their way to other tiers, where there is no host tier.
    free_bytes: tells how much host memory is free.
    """
    n_ranks = max(1, len(ranks))
    tiers: list[Tier] = []
    if args.kv_disk_bytes:
        tiers.append(_open_disk(args, fingerprint, layouts, ranks))
    if args.kv_store is not None:
        undivided = whole([tuple(each) for each in ranks or [layouts]])
        tiers.append(ReslicedPool(open_pool(args.kv_store, tagging_key()), layouts, undivided))
    sizes = [layout.block_bytes for layout in layouts]
    least = MIN_STAGED_BLOCKS * sum(map(padded, set(sizes)))
    host_bytes = (args.kv_host_bytes or 0) // n_ranks
    if ranks and host_bytes:
        padded_bytes = [sum(padded(group.block_bytes) for group in slices) for slices in ranks]
        host_bytes = host_bytes * sum(map(padded, sizes)) // max(padded_bytes)
    if args.kv_host_bytes is None and allocate is not None and n_ranks == 1:
        if default_bytes is None:
            default_bytes = default_host_tier_bytes(free_bytes(), n_gpus_of_machine())
        host_bytes = default_bytes
        allocate = SpareMemory(allocate, max(stage_bytes, least) if tiers else 0, free_bytes)
    if not host_bytes and not tiers:
        return None
    if args.kv_host_bytes is None and host_bytes < least:
        host_bytes = 0
    if host_bytes and host_bytes < least:
        raise BadInput(
            f"{host_bytes} bytes of host memory hold too few KV blocks of this model; give at least {least}",
            param="kv_host_bytes",
        )
    host = HostTier(host_bytes or max(stage_bytes, least), sizes, keep=bool(host_bytes), allocate=allocate)
    return TierManager(layouts, mover, host, tiers, PINNED_RATE if allocate is not None else HOST_RATE, ranks)


class SpareMemory:
    """Allocates memory that no flag asks for, and leaves SPARED_BYTES to other processes.

    The first `needed` bytes stage the blocks of tiers that were asked for: they are allocated in any case."""

    def __init__(self, allocate: Callable[[int], Segment], needed: int, free_bytes: Callable[[], int]) -> None:
        self._allocate, self._needed, self._free_bytes = allocate, needed, free_bytes

    def __call__(self, n_bytes: int) -> Segment:
        if self._needed <= 0 and self._free_bytes() < n_bytes + SPARED_BYTES:
            raise MemoryError("the rest is left to other processes; --kv-host-bytes says how much to take")
        self._needed -= n_bytes
        return self._allocate(n_bytes)


def _open_disk(
    args: argparse.Namespace, fingerprint: str, layouts: Sequence[KVGroup], ranks: Sequence[Sequence[KVGroup]]
) -> DiskTier:
    if args.kv_disk_path is None:
        raise BadInput("--kv-disk-bytes needs --kv-disk-path, a folder", param="kv_disk_path")
    n_ranks = max(1, len(ranks))
    capacity_bytes = args.kv_disk_bytes // n_ranks
    if ranks and (n_blocks := capacity_bytes // max(map(slot_bytes, ranks))):
        # Rank 0 decides what is evicted. The others have room for more blocks, until they hear of it.
        n_spared = 0 if args.rank else min(n_blocks // 4, 1 + SAVING_BYTES // slot_bytes(layouts))
        capacity_bytes = (n_blocks - n_spared) * slot_bytes(layouts)
    try:
        base = folder = model_folder(args.kv_disk_path, fingerprint)
        if n_ranks > 1:  # which keep different slices, of which a folder has those of one
            folder = base.with_name(f"{base.name}-rank{args.rank}of{n_ranks}")
        key = tagging_key()
        cipher_key = derived_key(key) if args.kv_disk_encrypt else None
        others, undivided = folders_of_other_groups(base, n_ranks), whole([tuple(each) for each in ranks or [layouts]])
        tier = DiskTier(folder, layouts, capacity_bytes, key, cipher_key, fingerprint, others=others, whole=undivided)
        if tier.unreadable and not args.rank:
            _log.warning(
                "KV on disk of this model by another number of ranks cannot be used by these %d: its stages, data type "
                "or order of keys are others, or the key is; delete it, or export it there and import it here",
                n_ranks,
                extra={"folders": [str(path) for path in tier.unreadable]},
            )
        return tier
    except CipherUnavailable as error:
        raise BadInput(str(error), param="kv_disk_encrypt") from None
    except OSError as error:
        raise BadInput(f"the KV cache on disk cannot be opened: {error}", param="kv_disk_path") from None


def stored_cache(args: argparse.Namespace, fingerprint: str, tiers: GroupTiers | None) -> StoredCache:
    """The same tiers as operators purge, export and import them."""
    key = tagging_key() if tiers is not None and os.environ.get(KEY_VARIABLE) else None
    return StoredCache(fingerprint, tiers, key, args.kv_disk_path if args.kv_disk_bytes else None)


def tagging_key() -> bytes:
    """The key of the tags of stored blocks, which whoever starts the worker derives."""
    text = os.environ.get(KEY_VARIABLE, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < 16:
        raise BadInput(
            f"a worker that stores KV blocks needs a key for their tags in {KEY_VARIABLE}: `openssl rand -hex 32`",
            param=KEY_VARIABLE,
        )
    return key


def _size(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value
