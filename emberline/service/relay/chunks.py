"""What servers stream: chunks of chat and text completions, as much of them as we read."""

from typing import Any

import msgspec


class Alternative(msgspec.Struct):
    token: str = ""
    logprob: float | None = None
    bytes: list[int] | None = None


class Logprob(Alternative):
    top_logprobs: list[Alternative] | None = None


class Logprobs(msgspec.Struct):
    """Of a chat: `content`; of a text completion: parallel lists."""

    content: list[Logprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class CalledFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: CalledFunction | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallPiece] | None = None


class ChunkChoice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None  # vLLM's: the stop string or token that ended it


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] = []


decoder = msgspec.json.Decoder(Chunk)
