"""The blocks of an engine as bytes in the host's memory."""

from collections.abc import Sequence


class HostMemory:
    """One buffer per KV group; a block's bytes lie together."""

    def __init__(
        self, pools: Sequence[memoryview], block_bytes: Sequence[int], descriptors: Sequence[int] = ()
    ) -> None:
        assert len(pools) == len(block_bytes)
        self.pools = [pool.cast("B") for pool in pools]
        self.block_bytes = tuple(block_bytes)
        self.descriptors = tuple(descriptors)  # of the shared memory behind the pools, where it is shared

    @property
    def n_groups(self) -> int:
        return len(self.block_bytes)

    def block(self, group: int, block: int) -> memoryview:
        n = self.block_bytes[group]
        return self.pools[group][block * n : (block + 1) * n]
