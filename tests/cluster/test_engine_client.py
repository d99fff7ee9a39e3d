import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from emberline.balancer.endpoint import Capacity, Endpoint
from emberline.balancer.stall_detector import StallLimits
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.timings import Timings
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import Conflict, ErrorInfo, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import OLDEST_VERSION, VERSION, EngineLoad, Heartbeat, KVEvents, Step, Vocabulary, encode
from emberline.protocol.request import EngineRequest, SamplingParams
from tests.service.fake_engine import FakeEngine

PATIENCE_S = 60.0


def request(sequence_id: str = "r1") -> EngineRequest:
    return EngineRequest(id=sequence_id, prompt_ids=tokens.pack([1, 2, 3]), sampling=SamplingParams(max_tokens=8))


async def until(condition: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.001)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine(tmp_path / "e.sock").start()
    yield engine
    await engine.die()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(engine.endpoint)
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    yield client
    await client.close()


async def test_deltas_that_arrive_together_are_delivered_together(engine: FakeEngine, client: EngineClient) -> None:
    stream = client.stream([request()])
    await engine.submission()
    engine.step(TokenDelta("r1", tokens.pack([5])))
    engine.step(TokenDelta("r1", tokens.pack([6])), TokenDelta("someone else", tokens.pack([9])))
    engine.step(TokenDelta("r1", tokens.pack([7]), finish="length"))
    await until(lambda: client.load.steps == 3)
    deltas = await stream.next()
    assert [tokens.unpack(delta.token_ids) for delta in deltas] == [[5], [6], [7]]
    assert deltas[-1].finish == "length"
    stream.close()
    assert not engine.aborted


async def test_a_waiting_consumer_wakes_at_each_step(engine: FakeEngine, client: EngineClient) -> None:
    stream = client.stream([request()])
    await engine.submission()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    engine.step(TokenDelta("r1", tokens.pack([5])))
    assert [tokens.unpack(delta.token_ids) for delta in await waiting] == [[5]]


async def test_several_sequences_share_a_stream(engine: FakeEngine, client: EngineClient) -> None:
    stream = client.stream([request("a")])
    stream.submit([request("b"), request("c")])
    await engine.submission(3)
    engine.step(*(TokenDelta(name, tokens.pack([5]), finish="stop") for name in "abc"))
    assert [delta.id for delta in await stream.next()] == ["a", "b", "c"]


async def test_closing_a_stream_aborts_its_sequences(engine: FakeEngine, client: EngineClient) -> None:
    engine.answers_aborts = False
    stream = client.stream([request("a"), request("b"), request("c")])
    await engine.submission(3)
    engine.step(TokenDelta("a", finish="stop"))
    await stream.next()
    stream.abort("b")
    stream.close()
    await until(lambda: len(engine.aborted) == 2)
    assert sorted(engine.aborted) == ["b", "c"]
    engine.step(TokenDelta("b", tokens.pack([1]), finish="cancelled"))  # a late delta is dropped
    await until(lambda: client.load.steps == 2)


async def test_a_lost_connection_fails_streams_after_their_delivered_deltas(
    engine: FakeEngine, client: EngineClient
) -> None:
    first, second = client.stream([request("a")]), client.stream([request("b")])
    await engine.submission(2)
    engine.step(TokenDelta("a", tokens.pack([5])))
    await until(lambda: client.load.steps == 1)
    waiting = asyncio.ensure_future(second.next())
    await engine.die()
    with pytest.raises(Unavailable):
        await waiting
    assert len(await first.next()) == 1
    with pytest.raises(Unavailable):
        await first.next()
    first.close()
    with pytest.raises(Unavailable):
        client.stream([request("c")])
    assert not client.connected


async def test_reconnects_when_the_engine_returns(engine: FakeEngine, client: EngineClient) -> None:
    await engine.die()
    await until(lambda: not client.connected)
    await engine.start()
    assert await client.wait_connected(PATIENCE_S)
    client.stream([request("again")])
    await engine.submission()


async def test_a_wrong_join_token_is_reported(engine: FakeEngine) -> None:
    client = EngineClient(Endpoint(name="e0", address=engine.endpoint.address, token="guess"))
    client.start()
    await until(lambda: client.problem == "wrong token")
    assert not client.connected
    await client.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff and more",
        b"\x19\0\0\0\x82\xa4type\xa7refused\xa5error\xa2\xff\xff\0\0",
        b"\x02\0\0\0\xa2\xff",
        (60_018).to_bytes(4, "little") + b"\x82\xa4type\xa9kv_events\xa1x" + b"\x91" * 60_000,
    ],
    ids=["huge", "not UTF-8", "short", "nested"],
)
async def test_a_protocol_violation_closes_the_connection(
    engine: FakeEngine, client: EngineClient, data: bytes
) -> None:
    stream = client.stream([request()])
    await engine.submission()
    for link in engine.links:
        link.write(data)
    with pytest.raises(Unavailable):
        await stream.next()
    await until(lambda: client.connected)  # and reconnects


async def test_tcp_options() -> None:
    engine = FakeEngine(Path("unused"))
    engine.listen()
    await engine.start()
    client = EngineClient(engine.endpoint)
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    (link,) = engine.links  # both sides set them
    peer = link.socket
    assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
    await client.close()
    await engine.die()


async def test_load_and_progress_follow_steps(client: EngineClient) -> None:
    before = client.progress_s
    client.absorb(Step([], EngineLoad(running=3, steps=9)))
    assert client.load.running == 3
    assert client.progress_s > before


@pytest.mark.parametrize("address", ["", "unix:", "tcp:host", "tcp::1", "tcp:host:0", "tcp:host:70000", "http://x"])
def test_bad_addresses_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="endpoint e0"):
        Endpoint(name="e0", address=address).split()


def test_addresses() -> None:
    assert Endpoint(name="e", address="unix:/run/e:0.sock").split() == ("/run/e:0.sock", "", 0)
    assert Endpoint(name="e", address="tcp:[::1]:90").split() == (None, "::1", 90)


async def test_the_vocabulary_is_sent_once_before_the_first_grammar(engine: FakeEngine, client: EngineClient) -> None:
    built = []

    def words() -> Vocabulary:
        built.append(len(engine.submitted))
        return Vocabulary([b"a"], {1: "<s>"})

    def bound(sequence_id: str) -> EngineRequest:
        return msgspec.structs.replace(request(sequence_id), grammar=b"g")

    client.vocabulary = words
    client.stream([request("plain")])
    client.stream([request("other"), bound("r2")])
    client.stream([bound("r3")])
    await engine.submission(4)
    assert [words.tokens for words in engine.vocabularies] == [[b"a"]]
    assert engine.before_vocabulary == ["plain"]
    await engine.die()
    await until(lambda: not client.connected)
    await engine.start()
    assert await client.wait_connected(PATIENCE_S)
    client.stream([bound("r4")])
    await engine.submission(5)
    assert len(engine.vocabularies) == len(built) == 2, "a new connection knows nothing yet"


async def test_grammars_are_sent_without_a_vocabulary_where_there_is_none(
    engine: FakeEngine, client: EngineClient
) -> None:
    client.stream([msgspec.structs.replace(request(), grammar=b"g")])
    await engine.submission()
    assert not engine.vocabularies


class Listener:
    """What the balancer is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.roles: list[str] = []

    def joined(self, endpoint: Endpoint, capacity: Capacity, load: EngineLoad) -> None:
        self.told.append("joined")
        self.roles.append(endpoint.role)

    def reported(self, name: str, load: EngineLoad) -> None: ...

    def kv_events(self, name: str, events: KVEvents) -> None: ...

    def distrusted(self, name: str) -> None: ...

    def left(self, name: str, why: str) -> None:
        self.told.append(f"left: {why}")


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[FakeEngine, EngineClient]]:
    """An engine with heartbeats, the core's connection to it, and short limits."""
    # This process may have to wait for a core of the machine: such a gap counts little.
    stalls = StallLimits(silent_s=0.3, min_stall_s=0.3, check_s=0.01, max_gap_s=0.02)
    engine = await FakeEngine(tmp_path / "w.sock", heartbeat_s=0.05).start()
    engine.beat_every(0.05)
    client = EngineClient(engine.endpoint, timings=Timings(stalls=stalls, first_retry_s=0.02))
    client.listener = Listener()
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    yield engine, client
    await client.close()
    await engine.die()


async def test_an_engine_that_sends_nothing_is_given_up_idle_or_not(watched: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = watched
    stalled: list[str] = []
    client.on_stall = stalled.append
    stream = client.stream([request()])
    await asyncio.sleep(0.5)
    assert client.connected, "its heartbeats come"
    engine.heartbeat = None
    with pytest.raises(Unavailable):
        async with asyncio.timeout(PATIENCE_S):
            await stream.next()
    assert stalled == ["e0"]
    assert "sent nothing" in client.problem


async def test_a_large_frame_that_arrives_slowly_is_no_silence(watched: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = watched
    engine.heartbeat = None
    (link,) = engine.links
    for byte in encode(Step([], EngineLoad(steps=7))):
        link.write(bytes([byte]))
        await asyncio.sleep(0.02)
    await until(lambda: client.load.steps == 7)
    assert client.connected


async def test_an_engine_that_hangs_in_a_step_is_given_up(watched: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = watched
    stream = client.stream([request()])
    engine.heartbeat = Heartbeat(5, in_step=True, step_s=0.001)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(PATIENCE_S):
            await stream.next()
    assert "no token" in client.problem


async def test_a_suspect_is_trusted_after_a_canary_generation(watched: tuple[FakeEngine, EngineClient]) -> None:
    engine, client = watched
    listener = client.listener
    assert isinstance(listener, Listener)
    engine.heartbeat = None
    await until(lambda: not client.connected)
    engine.heartbeat = Heartbeat()
    (canary,) = await engine.submission()
    assert canary.sampling.max_tokens == 1
    assert not client.connected
    assert "canary" in client.problem
    with pytest.raises(Unavailable, match="canary"):
        client.stream([request()])
    engine.step(TokenDelta(canary.id, finish="error", error=ErrorInfo("internal", "invalid numbers")))
    _, second = await engine.submission(2)
    assert listener.told == ["joined", "left: it has sent nothing for 0 s"]
    engine.step(TokenDelta(second.id, tokens.pack([5]), "length"))
    assert await client.wait_connected(PATIENCE_S)
    assert listener.told[2:] == ["joined"]
    client.stream([request()])


async def test_canary_requests_that_fail_are_repeated_less_and_less_often(
    watched: tuple[FakeEngine, EngineClient],
) -> None:
    engine, client = watched
    engine.heartbeat = None
    await until(lambda: not client.connected)
    engine.heartbeat = Heartbeat()
    failed_s = 0.0
    for n in (1, 2, 3, 4):
        canary = (await engine.submission(n))[-1]
        waited_s = time.monotonic() - failed_s
        failed_s = time.monotonic()
        if n < 4:
            engine.step(TokenDelta(canary.id, finish="error", error=ErrorInfo("internal", "invalid numbers")))
    assert waited_s >= 0.5 * 8 * client.timings.first_retry_s, "the fourth wait is eight times as long as the first"
    engine.step(TokenDelta(canary.id, tokens.pack([5]), "length"))
    assert await client.wait_connected(PATIENCE_S)


async def test_a_hung_engine_without_heartbeats_fails_its_streams(engine: FakeEngine) -> None:
    client = EngineClient(engine.endpoint, timings=Timings(hung_s=0.1, stalls=StallLimits(check_s=0.01)))
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    await until(lambda: time.monotonic() > client.progress_s + 0.15)
    assert client.connected, "an idle engine need not step"
    stream = client.stream([request()])
    await engine.submission()
    engine.step(TokenDelta("r1", tokens.pack([5])))
    assert len(await stream.next()) == 1
    with pytest.raises(Unavailable):
        async with asyncio.timeout(PATIENCE_S):
            await stream.next()
    assert "no step" in client.problem or client.connected  # again
    await client.close()


async def test_a_role_is_set_again_after_a_restart_and_the_balancer_learns_it(tmp_path: Path) -> None:
    engine = await FakeEngine(tmp_path / "e.sock", role="decode", transfers=("tcp",)).start()
    client = EngineClient(engine.endpoint)
    client.listener = told = Listener()
    client.start()
    assert await client.wait_connected(PATIENCE_S)
    client.check_role("prefill")
    client.set_role("prefill")
    await until(lambda: engine.info.role == client.role == "prefill")
    assert told.roles == ["decode", "prefill"]
    await engine.die()
    await until(lambda: not client.connected)
    engine.info = msgspec.structs.replace(engine.info, role="decode")  # as it is started
    await engine.start()
    await until(lambda: len(told.roles) == 4)
    assert told.roles == ["decode", "prefill", "decode", "prefill"]
    await client.close()
    await engine.die()


async def test_an_engine_of_the_previous_version_is_spoken_to_in_it(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / "old.sock", transfers=("tcp",), role="decode")
    engine.versions = (OLDEST_VERSION,)
    await engine.start()
    for known in (0, OLDEST_VERSION):
        client = EngineClient(msgspec.structs.replace(engine.endpoint, version=known))
        client.start()
        assert await client.wait_connected(PATIENCE_S)
        assert client.version == OLDEST_VERSION
        with pytest.raises(Conflict, match=r"older release.*upgrade"):
            client.check_role("prefill")
        client.set_role("prefill")  # not sent: it would not know the message
        stream = client.stream([request()])
        engine.step(TokenDelta("r1", b"\1\0\0\0", "stop"))
        assert await stream.next()
        assert engine.info.role == "decode"
        if not known:  # its endpoint may be a newer release later
            await engine.die()
            engine.versions = (VERSION,)
            await engine.start()
            await until(lambda client=client: client.connected and client.version == VERSION)
            await until(lambda client=client: client.role == "prefill")
            await engine.die()
            engine.versions, engine.info = (OLDEST_VERSION,), msgspec.structs.replace(engine.info, role="decode")
            await engine.start()
        await client.close()
    await engine.die()


async def test_an_engine_that_does_not_transfer_kv_serves_both_stages(engine: FakeEngine, client: EngineClient) -> None:
    with pytest.raises(Conflict, match="does not receive KV"):
        client.check_role("decode")
    client.check_role("both")
