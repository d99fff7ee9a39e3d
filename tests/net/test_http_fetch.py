"""Fetching what a client names: checked addresses, redirects too, within bytes and time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from emberline.net.egress_policy import EgressPolicy
from emberline.net.http_fetch import MAX_REDIRECTS, FetchLimits, fetch
from emberline.protocol.errors import BadInput

LOCAL = EgressPolicy(("127.0.0.0/8",))
LIMITS = FetchLimits(1000, 30.0)
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Site:
    """A server on loopback whose answers a test writes, and the heads of the requests that it got."""

    def __init__(self, port: int, heads: list[str]) -> None:
        self.port, self.heads = port, heads

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@asynccontextmanager
async def site(answer: Answer) -> AsyncIterator[Site]:
    heads: list[str] = []
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            await answer(heads[-1].split()[1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Site(server.sockets[0].getsockname()[1], heads)
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()


def body(data: bytes, status: str = "200 OK", *headers: str) -> Answer:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + data)

    return answer


async def test_a_file_is_fetched_without_credentials() -> None:
    async with site(body(b"pixels")) as found:
        assert await fetch(found.url("/a.png?b=c"), LOCAL, LIMITS, "image/png") == b"pixels"
    (head,) = found.heads
    assert head.startswith("GET /a.png?b=c HTTP/1.1\r\n")
    assert "accept: image/png" in head
    assert not {"cookie", "authorization", "referer"} & {line.partition(":")[0].lower() for line in head.split("\r\n")}


async def test_a_body_without_a_length_ends_with_the_connection_or_its_last_chunk() -> None:
    async def chunked(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    async def until_end(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nabcde")

    for answer in (chunked, until_end):
        async with site(answer) as found:
            assert await fetch(found.url(), LOCAL, LIMITS) == b"abcde"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_file_is_not_read_beyond_the_limit(announced: bool) -> None:
    async def endless(path: str, writer: asyncio.StreamWriter) -> None:
        length = b"content-length: 1001\r\n" if announced else b""
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 400)
            await writer.drain()

    async with site(endless) as found:
        with pytest.raises(BadInput, match="larger than 1,000 bytes"):
            await fetch(found.url(), LOCAL, LIMITS)


async def test_a_file_that_does_not_come_is_not_waited_for() -> None:
    async def hang(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        await asyncio.Event().wait()

    async with site(hang) as found:
        with pytest.raises(BadInput, match=r"not sent the file within 0\.2 s"):
            await fetch(found.url(), LOCAL, FetchLimits(1000, 0.2))


async def test_other_answers_are_refused() -> None:
    async def cut(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")

    async def garbage(path: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

    answers = {"status 404": body(b"", "404 Not Found"), "before its answer was complete": cut, "not HTTP": garbage}
    for why, answer in answers.items():
        async with site(answer) as found:
            with pytest.raises(BadInput, match=why):
                await fetch(found.url(), LOCAL, LIMITS)


async def test_a_server_that_closes_instead_of_a_tls_handshake_is_named_with_the_reason() -> None:
    async def hear_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.close()

    async with await asyncio.start_server(hear_and_close, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/a.png"
        with pytest.raises(BadInput, match=r"^127\.0\.0\.1 cannot be reached: closed during the TLS"):
            await fetch(url, LOCAL, LIMITS)


async def test_a_redirect_is_followed_to_a_checked_address() -> None:
    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/a.png":
            writer.write(b"HTTP/1.1 302 Found\r\nlocation: /b.png\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    async with site(answer) as found:
        assert await fetch(found.url(), LOCAL, LIMITS) == b"ok"
    assert [head.split()[1] for head in found.heads] == ["/a.png", "/b.png"]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("https://10.0.0.1/x", "inside the network"),
        ("http://169.254.169.254/latest/meta-data", "inside the network"),
        ("http://[::1]/x", "inside the network"),
        ("https://user:secret@127.0.0.1/x", "user name"),
        ("file:///etc/passwd", "must begin with https"),
        ("gopher://127.0.0.1/x", "must begin with https"),
        ("http://8.8.8.8/x", "must begin with https"),
    ],
)
async def test_a_redirect_leads_nowhere_else(target: str, why: str) -> None:
    async with site(body(b"", "302 Found", f"location: {target}")) as found:
        with pytest.raises(BadInput, match=why):
            await fetch(found.url(), LOCAL, LIMITS)
    assert len(found.heads) == 1


async def test_redirects_in_a_circle_end() -> None:
    async with site(body(b"", "301 Moved", "location: /again")) as found:
        with pytest.raises(BadInput, match=f"redirects more than {MAX_REDIRECTS} times"):
            await fetch(found.url(), LOCAL, LIMITS)
    assert len(found.heads) == MAX_REDIRECTS + 1


async def test_a_name_is_resolved_once_for_each_request() -> None:
    """A name that changes its address between the check and the connection gains nothing."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    policy = EgressPolicy(("127.0.0.0/8",), resolve)
    async with site(body(b"ok")) as found:
        assert await fetch(found.url(host="rebind.example"), policy, LIMITS) == b"ok"
        with pytest.raises(BadInput, match="inside the network"):
            await fetch(found.url(host="rebind.example"), policy, LIMITS)
    assert asked == ["rebind.example"] * 2
    assert len(found.heads) == 1
