import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

import msgspec
import pytest

from emberline.net.rpc import Peer, Table
from emberline.protocol.errors import Internal, NoSuchStream, RateLimited, Unavailable
from emberline.protocol.frames import LENGTH
from emberline.protocol.rate_limits import RateLimits


class Point(msgspec.Struct, frozen=True):
    x: int
    y: float = 0.5


class Shapes(Protocol):
    max_points: int = 64

    async def area(self, points: list[Point], scale: float = 1.0) -> float | None:
        """Fails as `failure` says."""

    async def corner(self, points: list[Point], at: int = 0) -> Point: ...

    def moved(self, point: Point, names: tuple[str, ...] = ()) -> None: ...


class Canvas(Protocol):
    async def size(self) -> dict[str, int]: ...

    def drawn(self, n: int) -> None: ...


class Server(NamedTuple):
    shapes: Shapes


class Client(NamedTuple):
    canvas: Canvas


SERVER, CLIENT = Table(Server), Table(Client)


class RealShapes:
    max_points = 64

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.failure: BaseException | None = None
        self.held = asyncio.Event()
        self.held.set()

    async def area(self, points: list[Point], scale: float = 1.0) -> float | None:
        self.log.append(("area", points, scale))
        await self.held.wait()
        if self.failure is not None:
            raise self.failure
        return scale * len(points) if points else None

    async def corner(self, points: list[Point], at: int = 0) -> Point:
        return points[at]

    def moved(self, point: Point, names: tuple[str, ...] = ()) -> None:
        self.log.append(("moved", point, names))


class RealCanvas:
    def __init__(self) -> None:
        self.n_drawn = 0

    async def size(self) -> dict[str, int]:
        return {"drawn": self.n_drawn}

    def drawn(self, n: int) -> None:
        self.n_drawn += n


class Pair:
    """Both ends of one link, in this process."""

    def __init__(self) -> None:
        self.own_shapes, self.own_canvas = RealShapes(), RealCanvas()
        self.tasks: set[asyncio.Task[None]] = set()
        self.server = Peer("a client", SERVER, Server(self.own_shapes), CLIENT, self.tasks)
        self.client = Peer("the server", CLIENT, Client(self.own_canvas), SERVER)
        self.shapes = SERVER.remote(self.client.send, self.client.call).shapes
        self.canvas = CLIENT.remote(self.server.send, self.server.call).canvas


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    peers = (pair.server, pair.client)
    for peer, end in zip(peers, socket.socketpair(), strict=True):
        await asyncio.get_running_loop().create_unix_connection(lambda peer=peer: peer, sock=end)  # type: ignore[misc]
    yield pair
    pair.own_shapes.held.set()
    for peer in peers:
        peer.drop("the test is over")
    await asyncio.gather(*(peer.closed for peer in peers))


async def until_served(pair: Pair) -> None:
    """Wait until the server has a call in progress."""
    while not pair.tasks or not pair.own_shapes.log:
        await asyncio.sleep(0)


async def test_arguments_and_results_cross_with_their_types(pair: Pair) -> None:
    corners = [Point(1), Point(2, 7.0)]
    assert await pair.shapes.corner(corners, 1) == Point(2, 7.0)
    assert await pair.shapes.corner(at=0, points=corners) == Point(1)
    assert await pair.shapes.area([]) is None
    assert await pair.shapes.area(corners, scale=2.5) == 5.0
    assert pair.own_shapes.log == [("area", [], 1.0), ("area", corners, 2.5)]
    assert pair.shapes.max_points == 64
    for wrong in ({}, {"points": [], "size": 3}):
        with pytest.raises(TypeError):
            await pair.shapes.corner(**wrong)


async def test_both_ends_call_and_frames_are_handled_in_order(pair: Pair) -> None:
    for n in range(3):
        pair.shapes.moved(Point(n), names=("a",))
        pair.canvas.drawn(n)
    assert (await pair.shapes.area([Point(9)]), await pair.canvas.size()) == (1.0, {"drawn": 3})
    moves = [("moved", Point(n), ("a",)) for n in range(3)]
    assert pair.own_shapes.log == [*moves, ("area", [Point(9)], 1.0)]
    answers = await asyncio.gather(*(pair.shapes.corner([Point(n)]) for n in range(50)))
    assert [point.x for point in answers] == list(range(50))


async def test_errors_are_raised_as_the_same_class(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    limits = RateLimits()
    for error in (NoSuchStream("no log"), RateLimited("slow down", param="key", retry_after_s=3, rate_limits=limits)):
        pair.own_shapes.failure = error
        with pytest.raises(type(error)) as raised:
            await pair.shapes.area([])
        assert raised.value.info() == error.info()
    assert not caplog.records
    pair.own_shapes.failure = ZeroDivisionError("a secret")
    with pytest.raises(Internal, match="internal error"):
        await pair.shapes.area([])
    (record,) = caplog.records
    assert (record.message, record.method) == ("a call of a client failed", "shapes.area")  # type: ignore[attr-defined]


async def test_calls_in_flight_fail_when_the_other_end_dies(pair: Pair) -> None:
    pair.own_shapes.held.clear()
    calls = [asyncio.create_task(pair.shapes.area([])) for _ in range(2)]
    await until_served(pair)
    pair.server.drop("killed")
    for call in (*calls, pair.shapes.area([])):  # the last one is made after the end
        with pytest.raises(Unavailable, match="the connection to the server was lost") as raised:
            await call
        assert raised.value.retry_after_s
    pair.shapes.moved(Point(1))  # a notice is lost without an error
    assert len(pair.tasks) == 2
    pair.own_shapes.held.set()
    await asyncio.wait(pair.tasks)  # what was begun is completed


async def test_a_cancelled_call_goes_on_at_the_other_end_and_its_answer_is_dropped(pair: Pair) -> None:
    pair.own_shapes.held.clear()
    call = asyncio.create_task(pair.shapes.area([]))
    await until_served(pair)
    call.cancel()
    await asyncio.wait([call])
    (served,) = pair.tasks
    pair.own_shapes.held.set()
    await served
    assert await pair.shapes.corner([Point(3)]) == Point(3)


async def test_a_call_that_its_receiver_cancels_is_answered(pair: Pair) -> None:
    pair.own_shapes.held.clear()
    call = asyncio.create_task(pair.shapes.area([]))
    await until_served(pair)
    (served,) = pair.tasks
    served.cancel()
    with pytest.raises(Unavailable, match="cancelled where it was served"):
        await call


@pytest.mark.parametrize(
    "message",
    [
        b"\xc1",
        msgspec.msgpack.encode(["shapes.area", 1, "no list", 1.0]),
        msgspec.msgpack.encode(["shapes.area"]),
        msgspec.msgpack.encode(["os.system", 1, "true"]),
        msgspec.msgpack.encode(["shapes.area.answer", 1, 1.0]),  # the server has made no such call
        msgspec.msgpack.encode({"type": "shapes.area"}),
    ],
)
async def test_bad_bytes_close_the_link_with_a_log_line(
    pair: Pair, message: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    pair.own_shapes.held.clear()
    call = asyncio.create_task(pair.shapes.area([]))
    await until_served(pair)
    before = list(pair.own_shapes.log)
    with caplog.at_level(logging.ERROR):
        pair.server.data_received(LENGTH.pack(len(message)) + message)
    with pytest.raises(Unavailable):
        await call
    (record,) = caplog.records
    assert record.getMessage().startswith(f"connection to a client closed: unreadable frame of {len(message)} bytes")
    assert pair.own_shapes.log == before


async def test_a_notice_that_fails_closes_the_link(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    pair.own_canvas.n_drawn = None  # type: ignore[assignment]
    pair.canvas.drawn(1)
    await asyncio.gather(pair.server.closed, pair.client.closed)
    assert "a frame of the server could not be handled" in caplog.text
