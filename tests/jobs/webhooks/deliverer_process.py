"""A process that does nothing but deliver: python -m tests.jobs.webhooks.deliverer_process WHERE"""

import asyncio
import sys

from emberline.store import open_store
from tests.jobs.webhooks.helpers import webhook_service


async def main(where: str) -> None:
    store = await open_store(where)
    async with webhook_service(store, timeout_s=55.0):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
