"""A client that leaves takes its work with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from emberline.api.http.asgi import Receive

T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection; there is nobody to answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, or ClientLeft with `work` cancelled and cleaned up. The body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_departure(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled():
                task.exception()  # retrieved: nobody is left to hear it


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
