"""The queue as the doors of one process use it: submitted work, and who reads it from its files."""

import asyncio

from emberline.api.batches.loader import Loader
from emberline.api.http.backend import Backend
from emberline.jobs.queue.queue import Queue


class BatchService:
    """Every process with a door has one, over the same store: a batch is known at all of them, and needs no core."""

    def __init__(self, queue: Queue, service: Backend) -> None:
        self.queue = queue
        self.loader = Loader(queue, service)
        self.closing = asyncio.Event()  # streams that wait for something end
        self.sizes: dict[tuple[str, int], int] = {}  # of files of results that were made, in bytes

    def load(self) -> None:
        """Read what is submitted, from now on, this process's and what others left behind."""
        self.loader.start()

    async def close(self) -> None:
        """The queue stays open."""
        self.closing.set()
        await self.loader.close()
