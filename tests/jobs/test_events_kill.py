"""A process killed in the middle of a delivery loses nothing: another sends it again, under the same id."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from emberline.jobs.webhooks.deliveries import LEASE_S

from ..databases import KINDS, a_place, postgres_server
from .desks import Moved, desk_on, endpoint_at, happen, log_when
from .receiver import HANG, receiving

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as url:
        yield url


@asynccontextmanager
async def delivering(where: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.jobs.delivering", where, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", KINDS)
async def test_killed_in_the_middle(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    server = request.getfixturevalue("server") if kind == "postgres" else None
    async with a_place(kind, tmp_path, server) as place, receiving(200, 200, HANG, HANG, HANG) as receiver:
        store = await place.open()
        db = Moved(store)
        async with desk_on(db, deliver=False) as desk:
            endpoint = await endpoint_at(desk, receiver.url)
            async with delivering(place.where) as process:
                for n in range(5):
                    await happen(db, f"batch_{n}")
                await receiver.until(5, timeout_s=20)
                await log_when(desk, endpoint, lambda log: [i.delivery.state for i in log].count("delivered") == 2)
                process.send_signal(signal.SIGKILL)
                await process.wait()
        db.ahead_s += LEASE_S + 1
        async with desk_on(db) as desk:
            log = await log_when(
                desk, endpoint, lambda log: len(log) == 5 and all(item.delivery.state != "pending" for item in log)
            )
        outcomes = sorted([a.succeeded for a in item.attempts] for item in log)
        assert outcomes == [[False, True]] * 3 + [[True]] * 2  # nobody knows of the first three how they ended
        assert len(receiver.got) == 8
        assert len(set(receiver.ids)) == 5
        await store.close()
