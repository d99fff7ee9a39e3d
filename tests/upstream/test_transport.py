"""The upstream transport over scripted attempts: what can be resumed, and how tokens are counted."""

import json
from typing import Any

import pytest

from emberline.balancer.endpoint import Endpoint
from emberline.protocol.errors import EngineLost
from emberline.protocol.events import TextEvent
from emberline.protocol.route_request import Route, RouteRequest
from emberline.upstream import resume
from emberline.upstream.dialects.chunks import ChunkReader
from emberline.upstream.dialects.dialect import CHAT, COMPLETIONS
from emberline.upstream.servers.client import UpstreamClient, UpstreamConfig
from emberline.upstream.transport import UpstreamTransport
from emberline.upstream.upstream_request import UpstreamRequest


class FakeExchange:
    headers = {"content-type": "text/event-stream"}

    def __init__(self, decode: UpstreamClient) -> None:
        self._decode = decode

    async def piece(self) -> bytes:
        if not FakeAttempt.pieces:
            raise self._decode.lost("broke")
        return FakeAttempt.pieces.pop(0)


class FakeAttempt:
    """Replies with the pieces of the class, then breaks."""

    pieces: list[bytes]
    path: str  # of the last attempt
    fields: dict[str, Any]

    def __init__(
        self, path: str, request_id: str, decode: UpstreamClient, prefill: UpstreamClient | None, trace: object
    ) -> None:
        self.decode, self.prefill = decode, prefill
        FakeAttempt.path = path

    async def open(self, fields: dict[str, Any]) -> FakeExchange:
        FakeAttempt.fields = fields
        return FakeExchange(self.decode)

    def close(self) -> None:
        pass


def event(text: str, index: int = 0) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


@pytest.fixture
def chat_fields() -> dict[str, Any]:
    """The fields of the request, for a test to change."""
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def opened(chat_fields: dict[str, Any]) -> UpstreamTransport[list[TextEvent]]:
    endpoints = [
        Endpoint(name=kind, address="http://127.0.0.1:1", kind=kind, models=("m",))  # type: ignore[arg-type]
        for kind in ("vllm", "openai")
    ]
    clients = {endpoint.name: UpstreamClient(UpstreamConfig(endpoint=endpoint)) for endpoint in endpoints}
    route = RouteRequest(id="r", account="a", model="m", model_version="v", input_tokens=3, created_us=1)
    reader = ChunkReader(1, (), 3)
    request = UpstreamRequest(route, CHAT, chat_fields)
    return UpstreamTransport(request, clients, lambda: reader, FakeAttempt)  # type: ignore[arg-type]


async def broken(opened: UpstreamTransport[list[TextEvent]], server: str, attempt: int, *pieces: bytes) -> EngineLost:
    """The error of an attempt that sends these pieces and breaks."""
    FakeAttempt.pieces = list(pieces)
    await opened.open(Route(decode=server), attempt, None)
    try:
        while True:
            await opened.next()
    except EngineLost as error:
        return error
    finally:
        opened.close()


async def test_tokens_of_all_attempts_are_counted_once(opened: UpstreamTransport[list[TextEvent]]) -> None:
    error = await broken(opened, "vllm", 0, event(""), event("a"), event("b"))
    assert opened.usage.completion_tokens == 2
    assert opened.fault(error).retryable
    assert opened.usage.completion_tokens == 2
    error = await broken(opened, "openai", 1, event(""), event("c"))
    assert opened.usage.completion_tokens == 3
    assert not opened.fault(error).retryable  # its kind cannot continue a text
    assert opened.usage.completion_tokens == 3


@pytest.mark.parametrize("seen", [[], [event(""), event("a")]])
async def test_a_stream_with_a_chunk_that_cannot_be_read_is_not_resumed(
    opened: UpstreamTransport[list[TextEvent]], seen: list[bytes]
) -> None:
    """The events of the text before that chunk, in the same piece, were never delivered."""
    error = await broken(opened, "vllm", 0, *seen, event("b") + event("c", index=7))
    assert not opened.fault(error).retryable


def with_ids(text: str, *ids: int) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": ids}
    first = {"prompt_token_ids": [1, 2]} if not ids else {}
    return b"data: " + json.dumps({"id": "c", "choices": [choice], **first}).encode() + b"\n\n"


async def test_tokens_whose_text_was_not_delivered_are_computed_again(
    opened: UpstreamTransport[list[TextEvent]],
) -> None:
    """They are the first bytes of a character."""
    error = await broken(opened, "vllm", 0, with_ids(""), with_ids("a", 7), with_ids("", 8))
    assert opened.fault(error).retryable
    error = await broken(opened, "vllm", 1, with_ids("", 8), with_ids("é", 9), with_ids("b", 10, 11))
    assert opened.usage.completion_tokens == 3  # by events: these chunks have no usage
    assert opened.fault(error).retryable
    assert opened.usage.completion_tokens == 5
    FakeAttempt.pieces = []
    await opened.open(Route(decode="vllm"), 2, None)
    assert (FakeAttempt.path, FakeAttempt.fields["prompt"]) == (COMPLETIONS, [1, 2, 7, 8, 9, 10, 11])


@pytest.mark.parametrize(
    ("server", "more", "kept"),
    [("vllm", {}, True), ("openai", {}, False), ("vllm", {"tools": []}, False), ("vllm", {"stop": "x"}, False)],
)
async def test_text_is_kept_only_where_the_stream_can_be_resumed(
    opened: UpstreamTransport[list[TextEvent]],
    chat_fields: dict[str, Any],
    server: str,
    more: dict[str, Any],
    kept: bool,
) -> None:
    chat_fields |= more
    await broken(opened, server, 0, event(""), event("a"))
    assert bool(opened._transcript._blocks) is kept


async def test_an_image_is_not_resumed_by_token_ids(
    opened: UpstreamTransport[list[TextEvent]], chat_fields: dict[str, Any]
) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat_fields["messages"] = [{"role": "user", "content": [part]}]
    await opened.open(Route(decode="vllm"), 0, None)
    assert "return_token_ids" not in FakeAttempt.fields
    chat_fields["messages"] = [{"role": "user", "content": "my file_url"}]
    await opened.open(Route(decode="vllm"), 0, None)
    assert FakeAttempt.fields["return_token_ids"]


async def test_the_transcript_holds_no_more_than_a_resume_needs() -> None:
    dropped, kept = resume.Transcript(keep=False), resume.Transcript(max_bytes=200)
    for transcript in (dropped, kept):
        transcript.add(event("a"))
    assert (dropped.chunks(), dropped.n_kept_bytes) == (None, 0)
    assert len(kept.chunks() or ()) == 1
    kept.add(event("b" * 200))
    assert (kept.chunks(), kept.n_kept_bytes) == (None, 0)
