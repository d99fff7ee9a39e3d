"""The memory that request bodies take in this process, counted and bounded, whatever connection they came over."""

import os
from typing import Protocol

from emberline.protocol.errors import Unavailable


class Holder(Protocol):
    """A request, or anything else that keeps bytes in memory."""

    held_bytes: int


class HeldBodies:
    """The bytes of request bodies in this process's memory, of all requests until they end."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.n_bytes = 0

    def add(self, holder: Holder, n_bytes: int) -> None:
        """Count bytes. Raises Unavailable if there are too many."""
        if self.n_bytes + n_bytes > self.most:
            raise Unavailable("too many large requests are being served: try again in a moment", retry_after_s=5)
        self.n_bytes += n_bytes
        holder.held_bytes += n_bytes

    def release(self, holder: Holder) -> None:
        """Count the holder's bytes no longer."""
        self.n_bytes -= holder.held_bytes
        holder.held_bytes = 0


held_bodies = HeldBodies(min(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8))
