"""The upstream client against servers that behave, and servers that do not."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial

import pytest
import uvloop

from emberline.net import http_client
from emberline.net.http_client import Address, Connection, ConnectionFailed, ConnectionPool, dial, parse, retry_after_s

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="session", params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


class Server:
    def __init__(self) -> None:
        self.n_connections = 0
        self.talk: Talk

    async def start(self, closed_s: float = http_client.CLOSED_S) -> ConnectionPool:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        address = Address("127.0.0.1", self.port, False, "")
        return ConnectionPool(address, key="secret", closed_s=closed_s)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.n_connections += 1
        try:
            while await self.request(reader) is not None:
                await self.talk(reader, writer)
                if writer.is_closing():
                    return
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader) -> bytes | None:
        try:
            self.head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return None
        length = int(self.head.lower().partition(b"content-length: ")[2].split(b"\r")[0] or 0)
        self.body = await reader.readexactly(length)
        return self.body

    def close(self) -> None:
        self._server.close()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    made.close()


def says(*pieces: bytes, close: bool = False, pause_s: float = 0.0) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return talk


async def whole(pool: ConnectionPool, body: bytes = b"{}") -> bytes:
    exchange = await pool.post("/x", body, "x-request-id: id-1\r\n")
    assert exchange.status == 200
    return await exchange.read(1 << 20)


@pytest.mark.parametrize(
    "pieces",
    [
        (HEAD + b"content-length: 5\r\n\r\nhello",),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",),
        tuple(bytes([byte]) for byte in HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"content-length: 5\r\n\r\nhello"),
    ],
)
async def test_replies_of_every_form_and_keep_alive(server: Server, pieces: tuple[bytes, ...]) -> None:
    server.talk = says(*pieces)
    pool = await server.start()
    for _ in range(3):
        assert await whole(pool, b"x" * 100_000) == b"hello"
    assert server.n_connections == 1
    assert b"authorization: Bearer secret\r\n" in server.head
    assert b"x-request-id: id-1\r\n" in server.head
    assert server.body == b"x" * 100_000
    pool.close()


async def test_what_a_server_sends_after_the_end_is_no_part_of_the_reply(server: Server) -> None:
    server.talk = says(HEAD + b"content-length: 5\r\n\r\nhello" + HEAD + b"x: y\r\ncontent-length: 4\r\n\r\nmore")
    pool = await server.start()
    exchange = await pool.post("/x", b"{}")
    assert await exchange.read(1 << 20) == b"hello"
    assert "x" not in exchange.headers
    pool.close()


async def test_a_reply_that_ends_with_its_connection(server: Server) -> None:
    server.talk = says(HEAD + b"\r\nhel", b"lo", close=True)
    pool = await server.start()
    assert await whole(pool) == b"hello"
    assert await whole(pool) == b"hello"
    assert server.n_connections == 2
    pool.close()


async def test_a_connection_that_was_closed_while_idle_is_not_an_error(server: Server) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.n_connections == 1 and server.body == b"second":
            return writer.close()  # as a server whose keep-alive has just run out
        writer.write(HEAD + b"content-length: 5\r\n\r\nhello")

    server.talk = once
    pool = await server.start(closed_s=60.0)
    assert await whole(pool) == b"hello"
    assert await whole(pool, b"second") == b"hello"
    assert server.n_connections == 2
    pool.close()


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ((b"what is HTTP?\r\n\r\n",), "not HTTP"),
        ((b"",), "closed the connection"),
        ((HEAD + b"content-length: 50\r\n\r\nhello",), "closed the connection"),
        ((HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhel",), "closed the connection"),
        ((HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nhello",), "not HTTP"),
        ((b"HTTP/1.1 200 OK\r\n" + b"".join(b"h%d: x\r\n" % i for i in range(500)) + b"\r\n",), "headers"),
        ((b"HTTP/1.1 200 OK\r\nh: " + b"x" * 100_000 + b"\r\n\r\n",), "headers|not HTTP"),
        ((b"HTTP/1.1 200 OK\r\nh: ", *64 * (b"x" * 65536,)), "headers"),
        ((b"HTTP/1.1 102 Processing\r\n\r\n" * 2000,) * 64, "headers"),
        ((CHUNKED + b"0\r\nt: ", *64 * (b"x" * 65536,)), "trailers"),
        ((CHUNKED + b"1;name=", *64 * (b"x" * 65536,)), "trailers"),
        ((CHUNKED, *16 * ((b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 256,)), "trailers"),
    ],
)
async def test_a_malformed_reply_fails_with_its_reason(server: Server, pieces: tuple[bytes, ...], reason: str) -> None:
    server.talk = says(*pieces, close=True)
    pool = await server.start()
    with pytest.raises(ConnectionFailed, match=reason):
        await whole(pool)
    pool.close()


async def test_a_cut_stream_gives_what_came_before_the_cut(server: Server) -> None:
    server.talk = says(HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", close=True, pause_s=0.05)
    pool = await server.start()
    exchange = await pool.post("/x", b"{}")
    assert await exchange.piece() == b"hello"
    with pytest.raises(ConnectionFailed):
        await exchange.piece()
    pool.close()


async def test_a_request_that_a_server_has_seen_is_not_sent_again(server: Server) -> None:
    bodies: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(server.body)
        if len(bodies) == 1:
            writer.write(HEAD + b"content-length: 2\r\n\r\nok")
        else:
            await asyncio.sleep(0.2)  # it computes, and then is gone
            writer.close()

    server.talk = talk
    pool = await server.start(closed_s=0.05)
    exchange = await pool.post("/", b"one")
    assert await exchange.read(10) == b"ok"
    with pytest.raises(ConnectionFailed):
        await pool.post("/", b"two")
    assert bodies == [b"one", b"two"]
    pool.close()


def test_an_address_costs_no_reading_of_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssl.create_default_context", lambda: pytest.fail("on the event loop"))
    for number in range(3):
        ConnectionPool(parse(f"https://{number}.example"))


async def test_a_reply_without_data_times_out(server: Server) -> None:
    server.talk = says(pause_s=0.0)
    pool = await server.start()
    with pytest.raises(ConnectionFailed, match="no data"):
        await pool.post("/x", b"{}", timeout_s=0.1)
    with pytest.raises(ConnectionFailed, match="within"):
        await pool.get("/health", 0.1)
    assert pool.n_connections <= 2
    pool.close()


async def test_closing_an_exchange_early_closes_its_connection(server: Server) -> None:
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        assert await reader.read() == b""
        closed.set()
        writer.close()

    server.talk = endless
    pool = await server.start()
    exchange = await pool.post("/x", b"{}")
    exchange.close()
    async with asyncio.timeout(60):
        await closed.wait()
    pool.close()


async def test_backpressure(server: Server) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(400):
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    server.talk = flood
    pool = await server.start()
    exchange = await pool.post("/x", b"{}")
    await asyncio.sleep(0.3)
    assert sent < 400
    assert len(await exchange.read(64 << 20)) == 400 * 65536
    pool.close()


async def test_a_long_reply_in_one_byte_chunks(server: Server) -> None:
    server.talk = says(CHUNKED, *100 * (b"1\r\nx\r\n" * 2000,), b"0\r\n\r\n")
    pool = await server.start()
    assert len(await whole(pool)) == 200_000
    pool.close()


async def test_a_reply_beyond_the_limit_is_aborted(server: Server) -> None:
    server.talk = says(HEAD + b"content-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
    pool = await server.start()
    exchange = await pool.post("/x", b"{}")
    with pytest.raises(ConnectionFailed, match="larger"):
        await exchange.read(1 << 20)
    pool.close()


async def test_a_body_in_pieces_waits_for_a_server_that_does_not_read(server: Server) -> None:
    reading, body = asyncio.Event(), b"x" * (1 << 20)

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(server.body))
        for _ in range(8):
            writer.write(await reader.readexactly(len(body)))

    server.talk = receive
    await server.start()
    made = Connection(lambda connection: connection.abort("ended"), lambda connection: None)
    connection = await dial(lambda: made, Address("127.0.0.1", server.port, False, ""))
    exchange = connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"")
    writing = asyncio.create_task(connection.write(8 * body))
    await asyncio.wait([writing], timeout=0.05)
    assert not writing.done()
    server.body = 8 * body
    reading.set()
    await writing
    assert await exchange.read(8 << 20) == 8 * body
    with pytest.raises(ConnectionFailed, match="closed"):
        await connection.write(b"more")


async def test_connection_refused() -> None:
    pool = ConnectionPool(Address("127.0.0.1", 1, False, ""))
    with pytest.raises(ConnectionFailed, match="no connection"):
        await pool.post("/x", b"{}")
    pool.close()


async def test_only_the_resolved_addresses_are_dialled_in_their_order(server: Server) -> None:
    server.talk = says(HEAD + b"content-length: 2\r\n\r\nok")
    await server.start()
    hosts: list[str] = []

    async def resolve() -> list[str]:
        return hosts

    pool = ConnectionPool(Address("127.0.0.1", server.port, False, ""), resolve=resolve)
    with pytest.raises(ConnectionFailed, match="no address"):  # never the name itself, which was not checked
        await pool.post("/x", b"{}")
    assert server.n_connections == 0
    hosts += ["127.0.0.2", "127.0.0.1"]  # nothing listens on the first
    assert (await pool.post("/x", b"{}")).status == 200
    assert server.n_connections == 1
    pool.close()


async def test_many_addresses_that_do_not_answer_take_no_longer_than_one() -> None:
    accepted: list[asyncio.StreamWriter] = []

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        await reader.read()  # no TLS handshake
        writer.close()

    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    address = Address("127.0.0.1", silent.sockets[0].getsockname()[1], True, "")
    make = partial(Connection, lambda _: None, lambda _: None)
    with pytest.raises(ConnectionFailed, match=r"no connection within 0\.4 s"):
        await dial(make, address, ["127.0.0.1"] * 50, timeout_s=0.4)
    assert len(accepted) <= 3
    silent.close()


@pytest.mark.parametrize(
    ("value", "least_s", "most_s"),
    [
        ("3", 3, 3),
        (" 2.5 ", 2.5, 2.5),
        (lambda: format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True), 3590, 3601),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
    ],
)
def test_retry_after(value: str | Callable[[], str], least_s: float, most_s: float) -> None:
    found = retry_after_s({"retry-after": value if isinstance(value, str) else value()})
    assert found is not None
    assert least_s <= found <= most_s


@pytest.mark.parametrize("value", ["", "soon", "-3", "nan", "inf", "1e999", "Wed, 99 Oct 2015 07:28:00 GMT"])
def test_no_valid_retry_after(value: str) -> None:
    assert retry_after_s({"retry-after": value}) is None
    assert retry_after_s({}) is None


@pytest.mark.parametrize(
    ("url", "host", "port", "header", "path"),
    [
        ("http://a:8000", "a", 8000, "a:8000", ""),
        ("http://a/v1/", "a", 80, "a", ""),
        ("https://a.example/base/v1", "a.example", 443, "a.example", "/base"),
        ("http://[::1]:9", "::1", 9, "[::1]:9", ""),
    ],
)
def test_urls(url: str, host: str, port: int, header: str, path: str) -> None:
    found = parse(url)
    assert (found.host, found.port, found.host_header, found.path) == (host, port, header, path)


@pytest.mark.parametrize(
    "url", ["", "a:8000", "ftp://a", "http://", "http://u:p@a", "http://a?x=1", "http://a:99999", "http://a/ b"]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse(url)
