"""The benchmarks' HTTP client over a socket, with responses of real servers."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.client import RequestFailed, parse, stream
from tests.examples import n_examples

CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(delta: dict[str, object], finish: str | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
BODY = [
    event({"role": "assistant", "content": None}),
    event({"content": "Grüß"}),
    event({"content": " dich"}),
    event({}, "length"),
    b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n",
    b"data: [DONE]\n\n",
]


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@asynccontextmanager
async def server(pieces: Sequence[bytes], pause_s: float = 0.0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers every connection with `pieces`, and records the requests."""
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(head + await reader.readexactly(length))
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1], asked


async def test_reads_a_stream_with_its_times_and_usage() -> None:
    pieces = [CHUNKED, *map(chunk, BODY), b"0\r\n\r\n"]
    async with server(pieces, pause_s=0.3) as (port, asked):
        reply = await stream(port, "/v1/x", {"model": "m"}, {"x-session-affinity": "s"})
    assert reply.text == "Grüß dich"
    assert (reply.prompt_tokens, reply.cached_tokens, reply.output_tokens) == (7, 4, 3)
    assert reply.finish == "length"
    # The role's event carries no text: the first token is counted one pause later, the last two pauses after that.
    assert 0.05 < reply.ttft_s < 60
    assert 0.05 < reply.decode_s < 60
    assert b"POST /v1/x HTTP/1.1" in asked[0]
    assert b"x-session-affinity: s" in asked[0]
    assert asked[0].endswith(b'{"model": "m"}')


async def test_returns_at_the_end_marker() -> None:
    async with server([CHUNKED, *map(chunk, BODY)], pause_s=0.0) as (port, _):
        reply = await asyncio.wait_for(stream(port, "/", {}), 60)
    assert reply.n_events == 3


async def test_finish_reason_completes_a_stream_without_end_marker() -> None:
    async with server([PLAIN, *BODY[:4]]) as (port, _):
        assert (await stream(port, "/", {})).text == "Grüß dich"


async def test_failures_are_distinguished() -> None:
    async with server([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b'{"error": "loading"}']) as (port, _):
        with pytest.raises(RequestFailed, match=r"503.*loading"):
            await stream(port, "/", {})
    with pytest.raises(RequestFailed, match="no connection"):
        await stream(port, "/", {})
    async with server([CHUNKED, chunk(BODY[1])]) as (port, _):
        with pytest.raises(RequestFailed, match="broke off"):
            await stream(port, "/", {})
    async with server([CHUNKED, chunk(b'data: {"error": {"message": "no room"}}\n\n')]) as (port, _):
        with pytest.raises(RequestFailed, match="no room"):
            await stream(port, "/", {})
    async with server([CHUNKED, chunk(BODY[1])], pause_s=3.0) as (port, _):
        with pytest.raises(RequestFailed, match="no end"):
            await stream(port, "/", {}, timeout_s=0.1)


@settings(max_examples=n_examples(60), deadline=None)
@given(
    cuts=st.lists(st.integers(1, 400), max_size=30),
    chunks=st.lists(st.integers(1, 80), max_size=30),
    framed=st.booleans(),
)
def test_packet_boundaries_do_not_matter(cuts: list[int], chunks: list[int], framed: bool) -> None:
    body = b"".join(BODY)
    framed_body = b"".join(map(chunk, _cut(body, chunks))) + b"0\r\n\r\n"
    raw = CHUNKED + framed_body if framed else PLAIN + body
    arrivals = [(1.0 + i, piece) for i, piece in enumerate(_cut(raw, cuts))]
    reply = parse(0.5, arrivals)
    assert reply.text == "Grüß dich"
    assert reply.cached_tokens == 4
    assert 1.0 <= reply.first_at <= reply.last_at <= arrivals[-1][0]


def _cut(raw: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(raw[:size])
        raw = raw[size:]
    return [piece for piece in [*pieces, raw] if piece]
