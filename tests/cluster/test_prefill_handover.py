"""The prefill side of a disaggregated request: late, silent, or lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from emberline.cluster.engine_client import EngineClient, EngineStream
from emberline.cluster.prefill_handover import Prefill, hand_over
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import EngineLost, ErrorInfo, Unavailable
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.frames import transfer_ticket
from tests.cluster.test_engine_client import PATIENCE_S, request
from tests.service.fake_engine import FakeEngine

GROUP = KVGroup("full", (0, 1), kv_heads=1, head_dim=8, dtype="float16")
TOKEN = TokenDelta("r1", tokens.pack([5]))


class Halves:
    def __init__(
        self, prefill: FakeEngine, decode: FakeEngine, client: EngineClient, stream: EngineStream, half: Prefill
    ) -> None:
        self.prefill, self.decode, self.stream, self.half = prefill, decode, stream, half
        self.client = client  # of the prefill worker


@asynccontextmanager
async def _client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine.endpoint, timings=Timings(cached_wait_s=0.01))
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    yield client
    await client.close()


@pytest.fixture
async def halves(tmp_path: Path) -> AsyncIterator[Halves]:
    prefill = await FakeEngine(tmp_path / "p.sock", name="p").start()
    decode = await FakeEngine(tmp_path / "d.sock", name="d").start()
    async with _client(prefill) as p, _client(decode) as d:
        stream, half = hand_over(p, d, request())
        (awaiting,), (pushing,) = await decode.submission(), await prefill.submission()
        assert pushing.push is not None
        assert (pushing.push.transfer, pushing.push.address) == (awaiting.awaits, decode.endpoint.address)
        yield Halves(prefill, decode, p, stream, half)
    await prefill.die()
    await decode.die()


async def test_the_prefill_worker_gets_a_ticket_and_not_the_join_token(halves: Halves) -> None:
    (pushing,) = halves.prefill.submitted
    assert pushing.push is not None
    assert pushing.push.ticket == transfer_ticket(halves.decode.endpoint.token, pushing.push.sender)
    assert halves.decode.endpoint.token.encode() not in msgspec.msgpack.encode(pushing)


async def test_the_prefill_workers_cached_tokens_are_reported(halves: Halves) -> None:
    halves.prefill.step(TokenDelta("r1-prefill", usage=Usage(cached_by_tier={"device": 32})))
    halves.decode.step(TOKEN)
    await halves.stream.next()
    async with asyncio.timeout(PATIENCE_S):  # the two connections are read in any order
        while halves.half.known_cached is None:
            await asyncio.sleep(0.001)
    assert await halves.half.cached_by_tier() == {"device": 32}
    assert halves.half.first_block_s is not None
    assert halves.half.ended_s is None
    halves.prefill.step(TokenDelta("r1-prefill", finish="stop"))
    async with asyncio.timeout(PATIENCE_S):
        while (ended_s := halves.half.ended_s) is None:
            await asyncio.sleep(0.001)
    assert ended_s >= halves.half.first_block_s, "the KV transfer as a trace shows it"


async def test_missing_cached_tokens_delay_the_first_token_only_briefly(halves: Halves) -> None:
    halves.decode.step(TOKEN)
    await halves.stream.next()
    async with asyncio.timeout(PATIENCE_S):
        assert await halves.half.cached_by_tier() == {}


async def test_a_first_token_that_races_with_the_end_of_prefill_is_kept(halves: Halves) -> None:
    """The end of prefill and the first token arrive before the consumer runs: it gets both, in the right order."""
    halves.half.fail(EngineLost("p"))
    halves.stream.deliver(TOKEN)
    assert await halves.stream.next() == [TOKEN]
    assert await halves.half.cached_by_tier() == {}
    with pytest.raises(EngineLost):
        await halves.stream.next()


async def test_a_failed_transfer_names_the_worker_that_reported_it(halves: Halves) -> None:
    """A prefill worker that reports that it cannot send is not to blame."""
    info = ErrorInfo("unavailable", "revoked", param="transfer")
    halves.prefill.step(TokenDelta("r1-prefill", finish="error", error=info))
    with pytest.raises(Unavailable) as told:
        async with asyncio.timeout(PATIENCE_S):
            await halves.stream.next()
    assert halves.half.error is told.value


@pytest.mark.parametrize("has_token", [False, True])
async def test_a_prefill_whose_kv_has_arrived_is_not_aborted(halves: Halves, has_token: bool) -> None:
    """The acknowledgement of the last blocks may reach the prefill worker after the reply has ended."""
    if has_token:
        halves.decode.step(TokenDelta("r1", tokens.pack([5]), finish="stop"))
        await halves.stream.next()
    halves.half.close()
    halves.client.request_abort(["the next request"])
    async with asyncio.timeout(PATIENCE_S):
        while "the next request" not in halves.prefill.aborted:
            await asyncio.sleep(0.001)
    assert ("r1-prefill" in halves.prefill.aborted) is not has_token


async def test_workers_whose_drafters_differ_are_refused_at_once(tmp_path: Path) -> None:
    """Nothing is submitted to either: a decode worker would wait a minute for KV that it cannot use."""
    drafts = KVGroup("draft", (2,), kv_heads=1, head_dim=8, dtype="float16")
    prefill = await FakeEngine(tmp_path / "p.sock", name="p", kv_groups=(GROUP,)).start()
    decode = await FakeEngine(tmp_path / "d.sock", name="d", kv_groups=(GROUP, drafts)).start()
    async with _client(prefill) as p, _client(decode) as d:
        with pytest.raises(Unavailable, match=r"p cannot compute prompts for d: .*draft.*give both the same drafts"):
            hand_over(p, d, request())
    assert decode.submitted == prefill.submitted == []
    await prefill.die()
    await decode.die()
