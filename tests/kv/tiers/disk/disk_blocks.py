"""Blocks to write to a disk tier: every byte follows from the number of the block."""

from hashlib import blake2b, shake_128
from pathlib import Path

from emberline.kv.tiers.disk.direct_file import aligned_buffer
from emberline.kv.tiers.disk.disk_tier import DiskTier
from emberline.kv.tiers.tier import BlockId, BlockMeta, layout_tag
from emberline.protocol.block_hash import KVGroup

GROUP = KVGroup("full", (0, 1), kv_heads=1, head_dim=64, dtype="bfloat16")  # 8 KiB a block
ODD = KVGroup("window64", (2,), kv_heads=1, head_dim=40, dtype="bfloat16", window=64)  # 2,560 bytes: not whole pages
KEY = b"tagging key of the tests"
OWNER, OTHER = b"O" * 16, b"P" * 16


def block_id(number: int, group: KVGroup = GROUP) -> BlockId:
    return BlockId(blake2b(number.to_bytes(4, "little", signed=True), digest_size=16).digest(), layout_tag(group))


def content(number: int, group: KVGroup = GROUP) -> bytes:
    return shake_128(f"{group.name}/{number}".encode()).digest(group.block_bytes)


def open_tier(base: Path, n_slots: int = 64, groups: tuple[KVGroup, ...] = (GROUP,), **options: object) -> DiskTier:
    slot_bytes = sum(4096 + -(-group.block_bytes // 4096) * 4096 for group in groups)
    return DiskTier(base, groups, n_slots * slot_bytes, KEY, **options)  # type: ignore[arg-type]


def write(tier: DiskTier, numbers: list[int], group: KVGroup = GROUP, aligned: bool = True, **meta: object) -> None:
    buffers = [memoryview(bytearray(content(number, group))) for number in numbers]
    if aligned:
        for n, plain in enumerate(buffers):
            buffers[n] = aligned_buffer(group.block_bytes)[: group.block_bytes]
            buffers[n][:] = plain
    metas = [
        BlockMeta(**{"owner": OWNER, "position": n, "parent": block_id(n - 1).key if n else OWNER, **meta})  # type: ignore[arg-type]
        for n in numbers
    ]
    tier.write([block_id(number, group) for number in numbers], buffers, metas)


def read(tier: DiskTier, numbers: list[int], group: KVGroup = GROUP, aligned: bool = True) -> list[bytes | None]:
    """What the tier returns for each block; None: missing."""
    buffers = [
        aligned_buffer(group.block_bytes)[: group.block_bytes] if aligned else memoryview(bytearray(group.block_bytes))
        for _ in numbers
    ]
    found = tier.read([block_id(number, group) for number in numbers], buffers)
    return [bytes(buffer) if good else None for buffer, good in zip(buffers, found)]


def held(tier: DiskTier, numbers: list[int], group: KVGroup = GROUP) -> list[int]:
    return [n for n, there in zip(numbers, tier.holds([block_id(n, group) for n in numbers])) if there]
