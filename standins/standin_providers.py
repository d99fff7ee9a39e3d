"""Stand-ins for the APIs of providers, Anthropic's and Gemini's: scripted replies and faults, strict about requests.

python -m standins.standin_providers --kind anthropic --port 0
"""

import argparse
import asyncio
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from standins.standin_openai import HttpConnection, HttpError, HttpRequest

encode = msgspec.json.Encoder().encode
Json = dict[str, Any]


class ProviderScript(msgspec.Struct, kw_only=True):
    """The reply of a provider, and how it fails."""

    text: str = "Hello from afar."
    thinking: str = ""
    calls: list[tuple[str, Json]] = []  # names and arguments of functions
    stop: str = ""  # the stop reason in the provider's words; empty: as the reply ends
    prompt_tokens: int = 20  # cached ones included
    cached_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 9
    thinking_tokens: int = 0
    usage: Json = {}  # replaces counts, in the provider's own words: a lie
    status: int = 0  # reply with this HTTP status
    retry_after: str = ""
    body: bytes = b""  # of that reply; empty: an error in the provider's form
    plain_json: bool = False  # reply with JSON where a stream is asked for
    html: bool = False  # reply with a page
    redirect: str = ""  # reply with a redirect to this address
    hang: bool = False  # never reply
    hang_after: int = -1  # bytes of the stream, then silence
    cut_after: int = -1  # bytes of the stream, then close
    error_after: int = -1  # events, then an error event
    split: int = 0  # send the stream in pieces of so many bytes


class StandinProvider:
    """One server. `requests` are the bodies it got; a request that its API would refuse is answered 400."""

    key = "sk-provider"

    def __init__(self, script: ProviderScript | None = None) -> None:
        self.script = script or ProviderScript()
        self.requests: list[Json] = []
        self.received: list[HttpRequest] = []  # every POST, as it came; the newest last
        self.headers: dict[str, str] = {}  # of the newest request
        self.port = 0
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[HttpConnection] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.version}"

    version = "v1"

    async def start(self, port: int = 0) -> "StandinProvider":
        # The loop opens the socket: asyncio sets TCP_NODELAY only on sockets that name their protocol, and without it
        # a reply of several writes waits 40 ms for an acknowledgement.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self._record_and_handle, self._connections), "127.0.0.1", port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _record_and_handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        if request.method == "POST":
            self.received.append(request)
            del self.received[:-1000]
        await self._handle(request, connection)

    async def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        script = self.script
        self.headers = request.headers
        extra = f"retry-after: {script.retry_after}\r\n" if script.retry_after else ""
        try:
            if script.hang:
                await asyncio.sleep(3600)
            if script.redirect:
                return connection.reply(307, b"", extra=f"location: {script.redirect}\r\n")
            if script.html:
                return connection.reply(script.status or 200, b"<html><h1>It works!</h1></html>", "text/html")
            if script.status:
                body = script.body or self.error(script.status, "scripted")
                return connection.reply(script.status, body, extra=extra)
            self.check_key(request.headers)
            if request.method == "GET":
                return connection.reply(200, encode(self.models()))
            body = msgspec.json.decode(request.body)
            self.requests.append(body)
            await self.answer(request, body, connection)
        except HttpError as error:
            connection.reply(error.status, self.error(error.status, str(error)))

    async def stream(self, connection: HttpConnection, events: list[bytes]) -> None:
        script = self.script
        if script.error_after >= 0:
            events = events[: script.error_after]
        data, most = b"".join(events), max(script.cut_after, script.hang_after)
        if most >= 0:
            data = data[:most]
        connection.begin_stream()
        size = script.split or len(data) or 1
        for start in range(0, len(data), size):
            connection.chunk(data[start : start + size])
            await asyncio.sleep(0)
        if script.hang_after >= 0:
            await asyncio.sleep(3600)
        if script.error_after >= 0:
            await asyncio.sleep(0.05)
            connection.chunk(self.error_event())
        if script.cut_after >= 0:
            await asyncio.sleep(0.01)
            return connection.transport.abort()
        connection.end_stream()

    def check_key(self, headers: dict[str, str]) -> None:
        raise NotImplementedError

    def models(self) -> Json:
        raise NotImplementedError

    async def answer(self, request: HttpRequest, body: Json, connection: HttpConnection) -> None:
        raise NotImplementedError

    def error(self, status: int, message: str) -> bytes:
        raise NotImplementedError

    def error_event(self) -> bytes:
        raise NotImplementedError


def _refuse(condition: bool, message: str) -> None:
    if condition:
        raise HttpError(400, message)


# --- Anthropic --------------------------------------------------------------------------------------------------------

_ANTHROPIC_FIELDS = frozenset(
    {
        *("model", "messages", "max_tokens", "system", "stream", "temperature", "top_p", "top_k", "stop_sequences"),
        *("tools", "tool_choice", "metadata", "thinking", "output_config", "service_tier", "cache_control"),
    }
)
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class StandinAnthropic(StandinProvider):
    def models(self) -> Json:
        return {"data": [{"type": "model", "id": "claude-opus-5"}], "has_more": False}

    def check_key(self, headers: dict[str, str]) -> None:
        given = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if given != self.key:
            raise HttpError(401, f"invalid x-api-key {given}")
        _refuse("anthropic-version" not in headers, "anthropic-version: header is required")

    def error(self, status: int, message: str) -> bytes:
        kind = _ERROR_TYPES.get(status, "api_error")
        return encode({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"})

    def error_event(self) -> bytes:
        return b"event: error\ndata: " + self.error(529, "Overloaded") + b"\n\n"

    async def answer(self, request: HttpRequest, body: Json, connection: HttpConnection) -> None:
        path = request.path.partition("?")[0]
        if path == "/v1/messages/count_tokens":
            return connection.reply(200, encode({"input_tokens": self.script.prompt_tokens}))
        if path != "/v1/messages":
            raise HttpError(404, f"no {path}")
        check_message_request(body)
        if body.get("stream") and not self.script.plain_json:
            await self.stream(connection, list(self._events(body["model"])))
        else:
            connection.reply(200, encode(self._message(body["model"])))

    def _usage(self) -> Json:
        script = self.script
        return {
            "input_tokens": script.prompt_tokens - script.cached_tokens - script.written_tokens,
            "cache_creation_input_tokens": script.written_tokens,
            "cache_read_input_tokens": script.cached_tokens,
            "output_tokens": script.output_tokens,
            **(
                {"output_tokens_details": {"thinking_tokens": script.thinking_tokens}} if script.thinking_tokens else {}
            ),
            **script.usage,
        }

    def _stop_reason(self) -> str:
        return self.script.stop or ("tool_use" if self.script.calls else "end_turn")

    def _blocks(self) -> list[Json]:
        script = self.script
        blocks: list[Json] = []
        if script.thinking:
            blocks.append({"type": "thinking", "thinking": script.thinking, "signature": "c2lnbmVk"})
        if script.text:
            blocks.append({"type": "text", "text": script.text})
        for number, (name, arguments) in enumerate(script.calls):
            blocks.append({"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": arguments})
        return blocks

    def _message(self, model: str) -> Json:
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": model}
        stop = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        return {**head, "content": self._blocks(), **stop, "usage": self._usage()}

    def _events(self, model: str) -> Iterator[bytes]:
        usage = self._usage()
        opening = {**self._message(model), "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
        yield _named("message_start", {"message": opening})
        yield _named("ping", {})
        for index, block in enumerate(self._blocks()):
            yield _named("content_block_start", {"index": index, "content_block": {**block, **_EMPTY[block["type"]]}})
            for delta in _deltas(block):
                yield _named("content_block_delta", {"index": index, "delta": delta})
            yield _named("content_block_stop", {"index": index})
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": None}
        yield _named("message_delta", {"delta": delta, "usage": usage})
        yield _named("message_stop", {})


_EMPTY: dict[str, Json] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}


def _named(kind: str, fields: Json) -> bytes:
    return f"event: {kind}\ndata: ".encode() + encode({"type": kind, **fields}) + b"\n\n"


def _deltas(block: Json) -> Iterator[Json]:
    if block["type"] == "text":
        for piece in re.findall(r"\S+\s*|\s+", block["text"]):
            yield {"type": "text_delta", "text": piece}
    elif block["type"] == "thinking":
        yield {"type": "thinking_delta", "thinking": block["thinking"]}
        yield {"type": "signature_delta", "signature": block["signature"]}
    elif block["input"]:
        text = encode(block["input"]).decode()
        yield {"type": "input_json_delta", "partial_json": ""}
        for start in range(0, len(text), 5):
            yield {"type": "input_json_delta", "partial_json": text[start : start + 5]}


def check_message_request(body: Json) -> None:
    """The refusal of the API, for what a translator can get wrong."""
    for name in body:
        _refuse(name not in _ANTHROPIC_FIELDS, f"{name}: Extra inputs are not permitted")
    _refuse(type(body.get("max_tokens")) is not int or body["max_tokens"] < 1, "max_tokens: Field required")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise HttpError(400, "messages: at least one message is required")
    _refuse(messages[0]["role"] != "user", "messages: first message must use the user role")
    called: set[str] = set()
    for number, message in enumerate(messages):
        where, blocks = f"messages.{number}", message["content"]
        _refuse(set(message) != {"role", "content"}, f"{where}: Extra inputs are not permitted")
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        _refuse(not blocks, f"{where}: content must not be empty")
        results = {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}
        _refuse(bool(results - called), f"{where}: unexpected `tool_use_id` found in `tool_result` blocks")
        _refuse(bool(called - results), f"{where}: `tool_use` ids were found without `tool_result` blocks after")
        called = {block["id"] for block in blocks if block["type"] == "tool_use"}
        for block in blocks:
            _check_block(block, where)
    for tool in body.get("tools", ()):
        _refuse(tool.get("type", "custom") == "custom" and "input_schema" not in tool, "tools: input_schema required")
    thinking = body.get("thinking", {})
    if thinking.get("type") == "enabled":
        _refuse(thinking["budget_tokens"] < 1024, "thinking.enabled.budget_tokens: at least 1024")
        _refuse(thinking["budget_tokens"] >= body["max_tokens"], "`max_tokens` must be greater than the budget")


def _check_block(block: Json, where: str) -> None:
    kind = block["type"]
    if kind == "text":
        _refuse(not block["text"], f"{where}: text content blocks must be non-empty")
    elif kind == "image":
        source = block["source"]
        _refuse(source["type"] == "base64" and "," in source["data"], f"{where}: invalid base64")
        _refuse(source["type"] == "url" and not source["url"].startswith("http"), f"{where}: invalid url")
    elif kind == "tool_use":
        _refuse(not isinstance(block["input"], dict), f"{where}: input must be a dictionary")
    elif kind == "thinking":
        _refuse("signature" not in block, f"{where}: signature: Field required")
    else:
        _refuse(kind not in ("tool_result", "document", "redacted_thinking"), f"{where}: unknown block {kind}")


# --- Gemini -----------------------------------------------------------------------------------------------------------

_GEMINI_FIELDS = frozenset(
    {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "safetySettings", "cachedContent"}
)
_CONFIG_FIELDS = frozenset(
    {
        *("temperature", "topP", "topK", "candidateCount", "maxOutputTokens", "stopSequences", "responseMimeType"),
        *("responseSchema", "responseJsonSchema", "presencePenalty", "frequencyPenalty", "seed", "thinkingConfig"),
    }
)
_PART_FIELDS = frozenset({"text", "inlineData", "functionCall", "functionResponse", "thoughtSignature", "fileData"})
_STATUSES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED"}


class StandinGemini(StandinProvider):
    version = "v1beta"

    def models(self) -> Json:
        return {"models": [{"name": "models/gemini-3-pro", "inputTokenLimit": 1_048_576}]}

    def check_key(self, headers: dict[str, str]) -> None:
        if headers.get("x-goog-api-key") != self.key:
            details = [{"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "API_KEY_INVALID"}]
            raise HttpError(400, f"API key not valid {headers.get('x-goog-api-key')} {details}")

    def error(self, status: int, message: str) -> bytes:
        error: Json = {"code": status, "message": message, "status": _STATUSES.get(status, "INTERNAL")}
        if status == 429:
            error["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "17s"}]
        return encode({"error": error})

    def error_event(self) -> bytes:
        return b"data: " + self.error(503, "The model is overloaded.") + b"\r\n\r\n"

    async def answer(self, request: HttpRequest, body: Json, connection: HttpConnection) -> None:
        path, _, query = request.path.partition("?")
        name, _, method = path.removeprefix("/v1beta/models/").partition(":")
        if method == "batchEmbedContents":
            rows = [{"values": [at, 0.5]} for at in range(len(body["requests"]))]
            return connection.reply(200, encode({"embeddings": rows}))
        if "image" in name:
            part = {"inlineData": {"mimeType": "image/png", "data": _PNG}}
            usage = {"promptTokenCount": 7, "candidatesTokenCount": 100}
            candidate = {"content": {"parts": [part], "role": "model"}, "finishReason": "STOP"}
            return connection.reply(200, encode({"candidates": [candidate], "usageMetadata": usage}))
        if method == "countTokens":
            return connection.reply(200, encode({"totalTokens": self.script.prompt_tokens}))
        if method not in ("streamGenerateContent", "generateContent"):
            raise HttpError(404, f"no {path}")
        check_content_request(body)
        events = list(self._events(name))
        if method == "streamGenerateContent" and self.script.plain_json:
            parts = [event.removeprefix(b"data: ").strip() for event in events]
            return connection.reply(200, b"[" + b",".join(parts) + b"]")
        if method == "streamGenerateContent":
            _refuse(query != "alt=sse", "the stand-in streams events only")
            await self.stream(connection, events)
        else:
            connection.reply(200, events[-1])

    def _events(self, model: str) -> Iterator[bytes]:
        script = self.script
        parts: list[Json] = [{"text": script.thinking, "thought": True}] if script.thinking else []
        parts += [{"text": piece} for piece in re.findall(r"\S+\s*|\s+", script.text)]
        for number, (name, arguments) in enumerate(script.calls):
            signature = {} if number else {"thoughtSignature": "c2lnbmVk"}
            parts.append({"functionCall": {"name": name, "args": arguments}, **signature})
        usage: Json = {"promptTokenCount": script.prompt_tokens, "candidatesTokenCount": script.output_tokens}
        if script.thinking_tokens:
            usage["thoughtsTokenCount"] = script.thinking_tokens
        if script.cached_tokens:
            usage["cachedContentTokenCount"] = script.cached_tokens
        usage |= {"totalTokenCount": script.prompt_tokens + script.output_tokens + script.thinking_tokens}
        usage |= script.usage
        for number, part in enumerate(parts):
            candidate: Json = {"content": {"parts": [part], "role": "model"}, "index": 0}
            if number == len(parts) - 1:
                candidate["finishReason"] = script.stop or "STOP"
            event = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": model, "responseId": "r1"}
            yield b"data: " + encode(event) + b"\r\n\r\n"


def check_content_request(body: Json) -> None:
    for name in body:
        _refuse(name not in _GEMINI_FIELDS, f'Unknown name "{name}": Cannot find field.')
    contents = body.get("contents")
    if not isinstance(contents, list) or not contents:
        raise HttpError(400, "contents is not specified")
    called: list[str] = []
    for content in contents:
        _refuse(content["role"] not in ("user", "model"), "Please use a valid role: user, model.")
        _refuse(not content["parts"], "must include at least one parts field")
        answered = [part["functionResponse"]["name"] for part in content["parts"] if "functionResponse" in part]
        _refuse(called != answered, "the number of function response parts must equal that of function call parts")
        called = [part["functionCall"]["name"] for part in content["parts"] if "functionCall" in part]
        for part in content["parts"]:
            for name in part:
                _refuse(name not in _PART_FIELDS, f'Unknown name "{name}" at contents')
            result = part.get("functionResponse", {"response": {}})["response"]
            _refuse(not isinstance(result, dict), "functionResponse.response: must be a Struct")
    for name in body.get("generationConfig", {}):
        _refuse(name not in _CONFIG_FIELDS, f'Unknown name "{name}" at generation_config')


# --- OpenAI --------------------------------------------------------------------------------------------------------

_PNG = "iVBORw0KGgo="


class StandinOpenAI(StandinProvider):
    """Chats, embeddings, images, speech, transcripts and videos. Forms are kept as they came."""

    def check_key(self, headers: dict[str, str]) -> None:
        if headers.get("authorization") != f"Bearer {self.key}":
            raise HttpError(401, "Incorrect API key provided")

    def models(self) -> Json:
        return {"object": "list", "data": [{"id": "gpt-image", "object": "model"}]}

    def error(self, status: int, message: str) -> bytes:
        return encode({"error": {"message": message, "type": "x", "param": None, "code": None}})

    async def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        path = request.path.removeprefix("/v1")
        if self.script.status or self.script.html or not path.startswith(("/audio/tr", "/images/edits", "/videos/")):
            return await super()._handle(request, connection)
        self.headers = request.headers
        try:
            self.check_key(request.headers)
        except HttpError as error:
            return connection.reply(error.status, self.error(error.status, str(error)))
        if path.startswith("/videos/"):
            if path.endswith("/content"):
                return connection.reply(200, b"mp4 bytes", "video/mp4")
            return connection.reply(200, encode({"id": "video_1", "status": "completed", "seconds": "4"}))
        self.requests.append({"form": request.body})
        if path == "/images/edits":
            return connection.reply(200, encode(self._images(1)))
        words = [{"word": "Hello", "start": 0.0, "end": 0.5}]
        segments = [{"id": 0, "start": 0.0, "end": 1.5, "text": " Hello there."}]
        text = {"text": "Hello there.", "language": "english", "duration": 1.5, "segments": segments, "words": words}
        connection.reply(200, encode(text))

    def error_event(self) -> bytes:
        return b"data: " + self.error(500, "The server had an error") + b"\n\n"

    def _chunks(self, model: str) -> Iterator[bytes]:
        script = self.script
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
        pieces = re.findall(r"\S+\s*|\s+", script.text)
        deltas: list[Json] = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in pieces)]
        for delta in deltas:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
            yield b"data: " + encode({**head, "choices": [choice]}) + b"\n\n"
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": script.stop or "stop"}
        yield b"data: " + encode({**head, "choices": [choice]}) + b"\n\n"
        n_prompt, n_output = script.prompt_tokens, script.output_tokens
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_output, "total_tokens": n_prompt + n_output}
        yield b"data: " + encode({**head, "choices": [], "usage": usage | script.usage}) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _images(self, n: int) -> Json:
        usage = {"input_tokens": 7, "output_tokens": 100, "total_tokens": 107}
        return {"created": 1, "data": [{"b64_json": _PNG}] * n, "usage": usage}

    async def answer(self, request: HttpRequest, body: Json, connection: HttpConnection) -> None:
        path = request.path.removeprefix("/v1")
        if path == "/chat/completions":
            await self.stream(connection, list(self._chunks(body["model"])))
        elif path == "/embeddings":
            rows = [{"object": "embedding", "index": at, "embedding": [at, 0.5]} for at in range(len(body["input"]))]
            usage = {"prompt_tokens": 8, "total_tokens": 8, **self.script.usage}
            connection.reply(200, encode({"object": "list", "data": rows[::-1], "model": "m", "usage": usage}))
        elif path == "/images/generations":
            connection.reply(200, encode(self._images(body.get("n") or 1)))
        elif path == "/audio/speech":
            connection.reply(200, b"audio bytes", "audio/mpeg")
        elif path == "/videos":
            connection.reply(200, encode({"id": "video_1", "status": "queued", "seconds": "4"}))
        else:
            raise HttpError(404, f"no {path}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m standins.standin_providers")
    parser.add_argument("--kind", choices=["anthropic", "gemini"], default="anthropic")
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args(argv)
    kind: Literal["anthropic", "gemini"] = args.kind

    async def run() -> None:
        server = await (StandinAnthropic() if kind == "anthropic" else StandinGemini()).start(args.port)
        print(server.url, flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    main()
