"""A worker drains: the conversations that it has cached are found on the others."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from emberline.cluster import prefix_push
from emberline.cluster.membership import Membership, WorkerChange
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.events import Completed, Usage
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import GenerateRequest, Message, Principal, RankEndpoint
from emberline.service import Served, Service, open_service
from emberline.service.core import LocalCore
from emberline.text.text_model import TextModel
from tests.service.conftest import ALICE, PATIENCE_S, offer
from tests.service.test_service import ask, events_of, in_flight, text_of
from tests.service.test_standin import Standin

BOB = Principal("bob", "", b"b" * 16)
REPLY = "a reply of many tokens, since each byte is one of them here; " * 4


class Fleet:
    """Two workers that check the content of each block that they use."""

    def __init__(self, service: Service, text_model: TextModel) -> None:
        self.service = service
        self._said = ".".join(map(str, tokens.unpack(text_model.encode(REPLY, special=False))))

    @property
    def membership(self) -> Membership:
        assert isinstance(self.service.core, LocalCore)
        assert self.service.core.membership is not None
        return self.service.core.membership

    async def begin(self, text: str, principal: Principal = ALICE, **more: object) -> tuple[Message, ...]:
        """The first turn of a conversation; its messages."""
        first = ask(text, session=f"standin:say={self._said}", **more)
        assert text_of(await events_of(self.service, first, principal)) == REPLY
        return (*(first.messages or ()), Message("assistant", REPLY))

    async def go_on(self, turns: tuple[Message, ...], principal: Principal = ALICE) -> Usage:
        request: GenerateRequest = ask(messages=(*turns, Message("user", "go on")), sampling={"max_tokens": 4})
        completed = (await events_of(self.service, request, principal))[-1]
        assert isinstance(completed, Completed)
        return completed.usage

    async def drain_busiest(self) -> str:
        """The worker that has computed the most; returns when its conversations are at the other one."""
        engines = (await self.service.operations.health()).detail["engines"]
        name = str(max(engines, key=lambda engine: engine["load"]["prompt_tokens"])["name"])
        await self.service.cluster_admin.change_workers(WorkerChange(action="drain", name=name))
        async with asyncio.timeout(PATIENCE_S):
            await self.membership.wait_pushed(name)
        return name

    async def received(self) -> int:
        return sum(
            each["load"]["blocks_received"] for each in (await self.service.operations.health()).detail["engines"]
        )


@pytest.fixture
async def fleet(text_model: TextModel, tmp_path: Path) -> AsyncIterator[Fleet]:
    workers = [Standin(tmp_path / f"{name}.sock", name, ("--check-kv",)) for name in ("e0", "e1")]
    served = Served(offer(text_model).card, text_model, tuple(worker.endpoint for worker in workers))
    timings = Timings(push_s=PATIENCE_S, remember_s=1.0)
    service = await open_service([served], data_dir=tmp_path / "data", timings=timings)
    assert await service.ready(PATIENCE_S)
    yield Fleet(service, text_model)
    await service.close()
    for worker in workers:
        worker.stop()


async def test_the_next_turns_find_their_conversations_on_the_other_worker(fleet: Fleet) -> None:
    talks = [await fleet.begin(f"conversation {n} of alice") for n in range(3)]
    of_bob = await fleet.begin("conversation of bob", BOB)
    for turns in talks:  # on either worker: where a turn costs the least depends on how busy the machine is
        await fleet.go_on(turns)
    await fleet.drain_busiest()
    assert await fleet.received() > 0
    for turns in talks:
        assert (await fleet.go_on(turns)).cached_tokens > 200
    assert (await fleet.go_on(of_bob, BOB)).cached_tokens > 200
    assert (await fleet.go_on(of_bob)).cached_tokens < 64, "an account finds nothing of another's"


async def test_what_still_runs_is_sent_when_it_has_ended_and_nothing_is_cut(fleet: Fleet) -> None:
    first = await fleet.begin("a conversation")
    running = asyncio.create_task(fleet.begin("one that runs", sampling={"max_tokens": 1000}))
    async with asyncio.timeout(PATIENCE_S):
        while not in_flight(fleet.service) and not running.done():
            await asyncio.sleep(0.001)
    for name in ("e0", "e1"):  # wherever it runs
        await fleet.service.cluster_admin.change_workers(WorkerChange(action="drain", name=name))
        if name == "e0":
            async with asyncio.timeout(PATIENCE_S):
                await fleet.membership.wait_pushed(name)
            await fleet.service.cluster_admin.change_workers(WorkerChange(action="undrain", name="e0"))
    async with asyncio.timeout(PATIENCE_S):
        await fleet.membership.wait_pushed("e1")
    assert (await fleet.go_on(await running)).cached_tokens > 200
    assert (await fleet.go_on(first)).cached_tokens > 200


async def test_without_bytes_to_spend_nothing_is_sent(fleet: Fleet) -> None:
    core = fleet.service.core
    assert isinstance(core, LocalCore)
    fleet.membership.pusher = prefix_push.PrefixPusher(
        core.sessions.recent, core.admission, fleet.service.engines, max_bytes=64
    )
    turns = await fleet.begin("a conversation")
    await fleet.drain_busiest()
    assert await fleet.received() == 0
    assert (await fleet.go_on(turns)).cached_tokens == 0


def test_the_bytes_of_all_ranks_count() -> None:
    group, window = KVGroup("full", (0,), 2, 8, "float16"), KVGroup("window16", (1,), 2, 8, "float16", window=16)
    facts: dict[str, Any] = dict(model="m", fingerprint="f", context_len=64, vocab_size=8, eos_ids=(2,))
    alone = EngineInfo(**facts, kv_groups=(group, window))
    assert prefix_push.kv_bytes_per_token(alone) == group.block_bytes / BLOCK_TOKENS
    ranks = tuple(RankEndpoint(address, (group, window)) for address in ("", "tcp:b:1"))
    several = EngineInfo(**facts, kv_groups=(group, window), ranks=ranks)
    assert prefix_push.kv_bytes_per_token(several) == 2 * group.block_bytes / BLOCK_TOKENS
