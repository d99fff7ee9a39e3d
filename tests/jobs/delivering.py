"""A process that does nothing but deliver: python -m tests.jobs.delivering WHERE"""

import asyncio
import sys

from emberline.store import open_store

from .desks import desk_on


async def main(where: str) -> None:
    store = await open_store(where)
    async with desk_on(store, timeout_s=15.0):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
