"""kill -9 during a delivery: another process repeats it under the same id."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from emberline.jobs.webhooks.deliveries import LEASE_S
from tests.databases import DatabaseLocation
from tests.jobs.webhooks.helpers import ShiftedClock, create_endpoint, emit_event, wait_for_records, webhook_service
from tests.jobs.webhooks.receiver import HANG, receiving

ROOT = Path(__file__).parents[3]


@asynccontextmanager
async def deliverer_process(where: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.jobs.webhooks.deliverer_process", where, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_delivery_of_a_killed_process_is_repeated_under_the_same_id(
    database: DatabaseLocation, db: ShiftedClock
) -> None:
    async with receiving(200, 200, HANG, HANG, HANG) as receiver:
        async with webhook_service(db, deliver=False) as webhooks:
            endpoint = await create_endpoint(webhooks, receiver.url)
            async with deliverer_process(database.where) as process:
                for n in range(5):
                    await emit_event(db, f"batch_{n}")
                await receiver.until(5)
                await wait_for_records(
                    webhooks, endpoint, lambda log: [i.delivery.state for i in log].count("delivered") == 2
                )
                process.send_signal(signal.SIGKILL)
                await process.wait()
        await db.advance(10 * LEASE_S)  # the process had a clock of its own, which did not stand still
        async with webhook_service(db) as webhooks:
            log = await wait_for_records(
                webhooks, endpoint, lambda log: len(log) == 5 and all(item.delivery.state != "pending" for item in log)
            )
        outcomes = sorted([a.succeeded for a in item.attempts] for item in log)
        assert outcomes == [[False, True]] * 3 + [[True]] * 2  # the outcome of the killed attempts is unknown
        assert len(receiver.got) == 8
        assert len(set(receiver.ids)) == 5
