"""KV events over a real ZMQ socket: gaps are replayed or forgotten, garbage is survived."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from emberline.protocol import token_ids as tokens
from emberline.protocol.frames import KVEvents
from emberline.upstream.servers.kv_events import END, KVSubscriber, chain_keys, key_root

zmq = pytest.importorskip("zmq")
zmq_asyncio = pytest.importorskip("zmq.asyncio")

ROOT = key_root("vllm", "m")
IDS = list(range(160))


class Publisher:
    """As vLLM's: publishes with numbers, replays what is asked for."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq_asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # which hears of subscriptions
        self._router = self._context.socket(zmq.ROUTER)
        self.address, self.replay = f"ipc://{folder}/pub", f"ipc://{folder}/replay"
        self._pub.bind(self.address)
        self._router.bind(self.replay)
        self.sent: list[bytes] = []
        self._task = asyncio.create_task(self._serve_replays())

    async def subscribed(self) -> None:
        """Until somebody is: what is published before is lost."""
        assert await asyncio.wait_for(self._pub.recv(), 60) == b"\1"

    def block(self, number: int) -> bytes:
        parent = number - 1 if number else None
        ids = IDS[number * 16 : number * 16 + 16]
        event = {"type": "BlockStored", "block_hashes": [number], "parent_block_hash": parent, "token_ids": ids}
        return msgspec.msgpack.encode([0.0, [{**event, "block_size": 16}]])

    async def publish(self, payload: bytes, lost: bool = False) -> None:
        number = len(self.sent)
        self.sent.append(payload)
        if not lost:
            await self._pub.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            for number in range(int.from_bytes(start, "big"), len(self.sent)):
                await self._router.send_multipart([client, b"", number.to_bytes(8, "big"), self.sent[number]])
            await self._router.send_multipart([client, b"", END.to_bytes(8, "big"), b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    await made.close()


class Follower:
    def __init__(self, publisher: Publisher, replay: bool) -> None:
        self.told: list[KVEvents] = []
        self.subscriber = KVSubscriber(
            "s", publisher.address, publisher.replay if replay else "", ROOT, self.told.append
        )
        self.task = asyncio.create_task(self.subscriber.run())

    @property
    def keys(self) -> bytes:
        found = b""
        for events in self.told:
            found = events.stored if events.whole else found + events.stored
        return found


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.01)


@pytest.fixture(params=[True, False], ids=["replayed", "forgotten"])
async def follower(publisher: Publisher, request: pytest.FixtureRequest) -> AsyncIterator[Follower]:
    made = Follower(publisher, request.param)
    await publisher.subscribed()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


def whole(n: int) -> bytes:
    return chain_keys(ROOT, tokens.pack(IDS[: n * 16]))


async def test_a_gap(publisher: Publisher, follower: Follower) -> None:
    replayed = bool(follower.subscriber._replay)
    await publisher.publish(publisher.block(0))
    await until(lambda: follower.keys == whole(1))
    await publisher.publish(publisher.block(1), lost=True)
    await publisher.publish(publisher.block(2), lost=True)
    await publisher.publish(publisher.block(3))
    await until(lambda: follower.subscriber.n_gaps == 1)
    if replayed:
        await until(lambda: follower.keys == whole(4))
    else:
        await until(lambda: any(events.whole for events in follower.told))
        assert follower.keys == b""
        assert "missing" in follower.subscriber.problem
        await publisher.publish(publisher.block(0))
        await until(lambda: follower.keys == whole(1))
        assert follower.subscriber.problem == ""


async def test_unreadable_messages_are_dropped_and_following_continues(
    publisher: Publisher, follower: Follower
) -> None:
    await publisher.publish(publisher.block(0))
    await until(lambda: follower.keys == whole(1))
    await publisher.publish(b"\xc1garbage")
    await until(lambda: "not msgpack" in follower.subscriber.problem)
    assert follower.keys == b""
    await publisher.publish(publisher.block(0))
    await until(lambda: follower.keys == whole(1))


async def test_a_restarted_server_begins_anew(publisher: Publisher, follower: Follower) -> None:
    for number in range(3):
        await publisher.publish(publisher.block(number))
    await until(lambda: follower.keys == whole(3))
    publisher.sent.clear()
    await publisher.publish(publisher.block(0))
    await until(lambda: follower.keys == whole(1))
