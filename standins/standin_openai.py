"""A stand-in for an OpenAI-compatible server: vLLM, SGLang or any other, with prefill/decode roles and faults.

python -m standins.standin_openai --port 0 --kind vllm --model NAME --script tokens=50,itl_ms=10
"""

import argparse
import asyncio
import json
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, cast

import httptools
import msgspec

from emberline.net.http_client import ConnectionFailed, ConnectionPool
from emberline.net.http_client import parse as parse_url
from standins.openai_script import (
    FIRST_WORD_ID,
    KVHandoffs,
    ServerScript,
    StandinPrefixCache,
    StandinPrompt,
    encode,
    parse_server_script,
)

ServerKind = Literal["openai", "vllm", "sglang"]
HttpHandler = Callable[["HttpRequest", "HttpConnection"], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class HttpRequest:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class HttpConnection(asyncio.Protocol):
    """Minimal HTTP, so that a benchmark measures what is in front of the stand-in."""

    def __init__(self, handler: HttpHandler, connections: "set[HttpConnection]") -> None:
        self._handler = handler
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_message_begin(self) -> None:
        self._path, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode("ascii")
        request = HttpRequest(method, self._path.decode("latin-1"), self._headers, b"".join(self._body))
        self._task = asyncio.get_running_loop().create_task(self._handler(request, self))

    def reply(self, status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> None:
        head = f"HTTP/1.1 {status} .\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
        self.transport.write(head.encode() + body)

    def begin_stream(self) -> None:
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.transport.write(b"0\r\n\r\n")


class _RecordingConnection(HttpConnection):
    """Keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        self.written += data


class HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StandinServer:
    """One server. Its KV side channel (NIXL's, or SGLang's bootstrap server) is on the same port.

    `disaggregated`: as one of SGLang's pair, it accepts no request without a bootstrap room.
    """

    def __init__(
        self,
        kind: ServerKind = "openai",
        model: str = "standin",
        script: ServerScript | None = None,
        disaggregated: bool = False,
    ) -> None:
        self.kind = kind
        self.disaggregated = disaggregated
        self.model = model
        self.script = script or ServerScript()
        self.engine_id = uuid.uuid4().hex
        self.cache = StandinPrefixCache()
        self.handoffs = KVHandoffs(self.script.lease_s, self.script.handoff_wait_s)
        self.headers: dict[str, str] = {}  # of the newest request
        self.received: list[HttpRequest] = []  # every POST, as it came; the newest last
        self.n_asked = 0  # requests, also those that fail
        self.requests: list[dict[str, Any]] = []  # bodies, with the request id as "_id"; the newest last
        self.violations: list[str] = []  # of the protocol, by the balancer
        self.n_aborted = 0
        self.running = 0
        self.waiting = 0
        self.n_tokens = 0  # computed
        self.stalled = False  # its engine computes nothing any more
        self.port = 0
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[HttpConnection] = set()
        self._canned: dict[bool, bytes] = {}  # whole responses, by whether they are streamed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> "StandinServer":
        # The loop opens the socket: asyncio sets TCP_NODELAY only on sockets that name their protocol, and without it
        # a reply of several writes waits 40 ms for an acknowledgement.
        self._server = await asyncio.get_running_loop().create_server(
            lambda: HttpConnection(self._handle, self._connections), "127.0.0.1", port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        """As if killed: every connection is reset."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _handle(self, request: HttpRequest, connection: HttpConnection) -> None:
        if request.method == "POST":
            self.received.append(request)
            del self.received[:-1000]
        try:
            await self._route(request, connection)
        except HttpError as error:
            body = {"error": {"message": str(error), "type": "scripted", "param": None, "code": error.status}}
            after = self.script.retry_after
            extra = f"retry-after: {after}\r\n" if error.status == 429 and after else ""
            connection.reply(error.status, encode(body), extra=extra)
        except asyncio.CancelledError:
            self.n_aborted += 1
            raise

    async def _route(self, request: HttpRequest, connection: HttpConnection) -> None:
        path, _, query = request.path.partition("?")
        if path in ("/v1/chat/completions", "/v1/completions"):
            return await self._complete(request, connection, chat=path.startswith("/v1/chat"))
        if path == "/standin":
            return self._control(request, connection)
        if self.script.unhealthy:
            raise HttpError(500, "unhealthy")
        if path == "/fetch":
            return await self._fetch(query, connection)
        if path == "/health_generate":
            await self.compute(1)
        answer = self._status(path)
        if answer is None:
            raise HttpError(404, f"no {path} here")
        connection.reply(200, answer, "text/plain" if path == "/metrics" else "application/json")

    def _status(self, path: str) -> bytes | None:
        """Models, health, load and the engine's id; None for an unknown path."""
        if path == "/v1/models":
            return encode({"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 8192}]})
        if path in ("/health", "/health_generate"):
            if self.script.dead_engine:
                raise HttpError(503, "the engine is dead")
            return b""
        if path == "/metrics" and self.kind == "vllm":
            return (
                f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {float(self.running)}\n'
                f'vllm:num_requests_waiting{{engine="0",model_name="{self.model}"}} {float(self.waiting)}\n'
                f'vllm:generation_tokens_total{{engine="0",model_name="{self.model}"}} {float(self.n_tokens)}\n'
                f'vllm:iteration_tokens_total_count{{engine="0",model_name="{self.model}"}} {float(self.n_tokens)}\n'
                f'vllm:kv_cache_usage_perc{{engine="0",model_name="{self.model}"}} {min(1.0, self.running / 1000)}\n'
                'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0\n'
            ).encode()
        if path == "/v1/loads" and self.kind == "sglang":
            core = {"num_running_reqs": self.running, "num_waiting_reqs": self.waiting}
            core |= {"num_waiting_uncached_tokens": 0, "num_used_tokens": 160 + self.n_tokens % 1600}
            return encode({"loads": [{**core, "max_total_num_tokens": 1_600_000}]})
        if path == "/query":
            return encode({"0": {"engine_id": self.engine_id}})
        return None

    def _control(self, request: HttpRequest, connection: HttpConnection) -> None:
        """The server's state for tests; a POST replaces the script."""
        if request.method == "POST":
            self.script = parse_server_script(request.body.decode())
        state = {
            "violations": self.violations,
            "leased": self.handoffs.leased,
            "fetched": self.handoffs.fetched,
            "aborted": self.n_aborted,
            "requests": len(self.requests),
        }
        connection.reply(200, encode(state))

    async def _fetch(self, query: str, connection: HttpConnection) -> None:
        """A decode server fetches the KV of a prompt."""
        name, wait = query.removeprefix("name=").partition("&wait")[::2]
        n_tokens = await self.handoffs.wait(name) if wait else self.handoffs.fetch(name)
        if n_tokens is None:
            raise HttpError(404, "nothing is held under that name")
        connection.reply(200, encode({"tokens": n_tokens}))

    async def _complete(self, request: HttpRequest, connection: HttpConnection, chat: bool) -> None:
        script = self.script
        self.n_asked += 1
        failing = script.times != 0
        if script.times > 0 and script.has_fault:
            script.times -= 1
        if failing and script.garbage:
            connection.transport.write(b"\x00\x01 what is HTTP?\r\n\r\n")
            return connection.transport.close()
        if failing and script.html:
            return connection.reply(200, b"<html><body>Sign in to continue</body></html>", "text/html")
        if failing and script.status:
            raise HttpError(script.status, script.message)
        if script.canned:
            return connection.transport.write(self._canned_response(request.body, chat))
        body = msgspec.json.decode(request.body)
        self.requests.append({**body, "_id": request.headers.get("x-request-id", "")})
        self.headers = request.headers
        del self.requests[:-1000]
        if body.get("model") != self.model:
            raise HttpError(404, f"The model `{body.get('model')}` does not exist.")
        await self._wait_for_slot()
        self.running += 1
        try:
            if failing and script.hang:
                await asyncio.sleep(3600)
            await self.compute(0)
            await StandinCompletion(self, body, connection, chat, failing).run()
        finally:
            self.running -= 1

    async def _wait_for_slot(self) -> None:
        self.waiting += 1
        try:
            while self.script.slots and self.running >= self.script.slots:
                await asyncio.sleep(0.005)
        finally:
            self.waiting -= 1

    async def compute(self, n_tokens: int) -> None:
        """Never returns while the engine is stalled."""
        while self.stalled:
            await asyncio.sleep(0.005)
        self.n_tokens += n_tokens

    def _canned_response(self, body: bytes, chat: bool) -> bytes:
        """The response to an empty prompt, computed once."""
        streamed = b'"stream":true' in body or b'"stream": true' in body
        if streamed not in self._canned:
            recorder = _RecordingConnection()
            request = {"messages": [], "stream": streamed, "stream_options": {"include_usage": True}}
            server = StandinServer(model=self.model, script=ServerScript(tokens=self.script.tokens))
            StandinCompletion(server, request, recorder, chat, False).reply_at_once()
            self._canned[streamed] = recorder.written
        return self._canned[streamed]


class StandinCompletion:
    """One completion request. `failing`: the script's faults apply."""

    def __init__(
        self, server: StandinServer, body: dict[str, Any], connection: HttpConnection, chat: bool, failing: bool
    ) -> None:
        self._server = server
        self._script = server.script
        self._body = body
        self._connection = connection
        self._chat = chat
        self._failing = failing
        self._prompt = StandinPrompt(body)
        self._cached = 0
        self._kv_transfer_params: dict[str, Any] | None = None

    async def run(self) -> None:
        await self._transfer_kv()
        if self._script.ttft_ms:
            await asyncio.sleep(self._script.ttft_ms / 1000)
        limit = self._body.get("max_completion_tokens") or self._body.get("max_tokens") or self._script.tokens
        words = self._script.words(self._prompt, limit)
        if self._body.get("stream") and not self._script.plain_json:
            await self._stream(words)
        else:
            self._reply(words)

    def reply_at_once(self) -> None:
        words = self._script.words(self._prompt, self._script.tokens)
        if not self._body.get("stream"):
            return self._reply(words)
        self._connection.begin_stream()
        self._connection.chunk(b"".join(self._events(words)))
        self._connection.end_stream()

    # --- prefill/decode disaggregation -------------------------------------------------------------------------------

    async def _transfer_kv(self) -> None:
        server, body = self._server, self._body
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and server.kind != "vllm":
            server.violations.append("kv_transfer_params to a server that is not vLLM")
        elif isinstance(params, dict) and params.get("do_remote_decode"):
            self._prefill(params)
        elif isinstance(params, dict) and params.get("do_remote_prefill"):
            await self._decode(params)
        elif "bootstrap_room" in body:
            await self._bootstrap()
        elif server.disaggregated:
            server.violations.append("no room")
            raise HttpError(400, "a disaggregated server needs bootstrap_room")
        else:
            self._cached = server.cache.cached_tokens(self._prompt)

    def _prefill(self, params: dict[str, Any]) -> None:
        server, body = self._server, self._body
        wrong = [name for name in ("stream_options", "min_tokens") if name in body]
        if body.get("stream") is not False or body.get("max_tokens") != 1 or wrong:
            server.violations.append(f"prefill request: stream, max_tokens or {wrong}")
        if body.get("max_completion_tokens", 1) != 1:
            server.violations.append("prefill request: max_completion_tokens")
        self._cached = server.cache.cached_tokens(self._prompt)
        name = params.get("transfer_id") or f"req-{uuid.uuid4().hex}"
        server.handoffs.hold(name, self._prompt.n_tokens)
        if "transfer_id" in params or (self._failing and self._script.no_params):
            return
        self._kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(self._prompt.blocks())))],
            "remote_engine_id": server.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": server.port,
            "tp_size": 1,
        }

    async def _decode(self, params: dict[str, Any]) -> None:
        if "transfer_id" in params:
            await self._fetch_kv(params["remote_bootstrap_addr"], f"{params['transfer_id']}&wait")
        else:
            await self._fetch_kv(f"http://{params['remote_host']}:{params['remote_port']}", params["remote_request_id"])
        self._server.cache.cached_tokens(self._prompt)
        self._cached = self._prompt.n_tokens - 1 if self._script.reports_cached == "all" else 0

    async def _bootstrap(self) -> None:
        """Both servers get the same body; the one whose address it names is prefill."""
        server, body = self._server, self._body
        host, port, room = (_first(body[f"bootstrap_{name}"]) for name in ("host", "port", "room"))
        name = f"room-{room}"
        self._cached = server.cache.cached_tokens(self._prompt)
        if port == server.port:
            server.handoffs.hold(name, self._prompt.n_tokens)
            if not await server.handoffs.fetched_by(name):
                raise HttpError(500, "the decode server did not fetch the KV")
        else:
            await self._fetch_kv(f"http://{host}:{port}", f"{name}&wait")

    async def _fetch_kv(self, url: str, name: str) -> None:
        pool = ConnectionPool(parse_url(url))
        n_tokens = None
        try:
            status, body = await pool.get(f"/fetch?name={name}", 30.0)
            n_tokens = int(msgspec.json.decode(body)["tokens"]) if status == 200 else None
        except ConnectionFailed:
            pass
        finally:
            pool.close()
        if n_tokens != self._prompt.n_tokens:
            raise HttpError(500, f"KV of {n_tokens} tokens for a prompt of {self._prompt.n_tokens}")

    # --- replies -----------------------------------------------------------------------------------------------------

    def _finish_reason(self, words: list[str]) -> str:
        limit = self._body.get("max_completion_tokens") or self._body.get("max_tokens")
        return "length" if limit == len(words) else "stop"

    def _usage(self, n_words: int) -> dict[str, Any]:
        details = None if self._server.kind == "vllm" and not self._cached else {"cached_tokens": self._cached}
        n_prompt = self._prompt.n_tokens
        return {
            "prompt_tokens": n_prompt,
            "prompt_tokens_details": details,
            "completion_tokens": n_words,
            "total_tokens": n_prompt + n_words,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self._chat else "cmpl"
        completion_id = f"{prefix}-{self._body.get('_id') or uuid.uuid4().hex}"
        return {"id": completion_id, "object": kind, "created": int(time.time()), "model": self._server.model}

    def _reply(self, words: list[str]) -> None:
        script = self._script
        if self._failing and max(script.cut_after, script.error_after) >= 0:
            return self._connection.transport.abort()
        if self._failing and script.die_after >= 0:
            os._exit(9)
        text = "".join(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._finish_reason(words), "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        body = self._head("chat.completion" if self._chat else "text_completion")
        body |= {"choices": [choice], "usage": self._usage(len(words)), "kv_transfer_params": self._kv_transfer_params}
        answer = encode(body)
        self._connection.reply(200, answer[: len(answer) // 2] if self._failing and script.bad_json else answer)

    async def _stream(self, words: list[str]) -> None:
        script, connection = self._script, self._connection
        events = self._events(words)
        connection.begin_stream()
        if not (script.itl_ms or script.split or (self._failing and script.has_fault)):
            self._server.n_tokens += len(words)
            connection.chunk(b"".join(events))
            return connection.end_stream()
        for number, event in enumerate(events):
            if self._failing and script.fault_ms and number - 1 in (script.cut_after, script.error_after):
                await asyncio.sleep(script.fault_ms / 1000)
            if self._failing and self._inject_fault(number - 1):
                return
            await self._server.compute(1)
            for start in range(0, len(event), script.split or len(event)):
                connection.chunk(event[start : start + (script.split or len(event))])
                if script.split:
                    await asyncio.sleep(0)
            if script.itl_ms:
                await asyncio.sleep(script.itl_ms / 1000)
        connection.end_stream()

    def _inject_fault(self, n_words: int) -> bool:
        """True if a fault after that many words has ended the stream."""
        script, connection = self._script, self._connection
        if n_words < 0:
            return False
        if n_words == script.die_after:
            os._exit(9)
        self._server.stalled = self._server.stalled or n_words == script.stall_after
        if n_words == script.cut_after:
            connection.transport.abort()
            return True
        if n_words == script.error_after:
            connection.chunk(b'data: {"error": {"message": "scripted", "code": 500}}\n\n')
            connection.end_stream()
            return True
        return False

    def _events(self, words: list[str]) -> list[bytes]:
        head = self._head("chat.completion.chunk" if self._chat else "text_completion")
        opening = b"data: " + encode(head)[:-1] + b',"choices":['
        events: list[bytes] = []
        if self._chat:
            role = b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]'
            prompt_ids = b',"prompt_token_ids":' + encode(self._prompt.token_ids) if self._gives_ids else b""
            events.append(opening + role + self._running_usage(0) + prompt_ids + b"}\n\n")
        for start in range(0, len(words), self._script.event_tokens):
            events.append(opening + self._text_choice(words, start) + b"}\n\n")
        if self._failing and self._script.bad_json:
            events.insert(2, b"data: {never ends\n\n")
        last = b'"delta":{}' if self._chat else b'"text":""'
        finish = self._finish_reason(words).encode()
        events.append(
            opening
            + (b'{"index":0,' + last + b',"finish_reason":"' + finish + b'"}]' + self._running_usage(len(words)))
            + b"}\n\n"
        )
        if (self._body.get("stream_options") or {}).get("include_usage"):
            events.append(opening + b'],"usage":' + encode(self._usage(len(words))) + b"}\n\n")
        if not (self._failing and self._script.no_done):
            events.append(b"data: [DONE]\n\n")
        return events

    def _text_choice(self, words: list[str], start: int) -> bytes:
        """The choices of the event with the words from `start` on, and its running usage."""
        end = min(len(words), start + self._script.event_tokens)
        before, after = (b'"delta":{"content":', b"}") if self._chat else (b'"text":', b"")
        ids = b""
        if self._gives_ids:
            first = FIRST_WORD_ID + self._prompt.n_replied
            ids = b',"token_ids":' + encode(list(range(first + start, first + end)))
            if not self._chat and not start:
                ids += b',"prompt_token_ids":' + encode(self._prompt.token_ids)
        text = encode("".join(words[start:end]))
        return (
            b'{"index":0,' + before + text + after + b',"finish_reason":null' + ids + b"}]" + self._running_usage(end)
        )

    @property
    def _gives_ids(self) -> bool:
        return self._server.kind == "vllm" and bool(self._body.get("return_token_ids"))

    def _running_usage(self, n_words: int) -> bytes:
        """Where it is asked for in every chunk."""
        asked = (self._body.get("stream_options") or {}).get("continuous_usage_stats")
        if not asked or self._server.kind == "openai":
            return b""
        return b',"usage":' + encode(self._usage(n_words))


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


async def _serve(args: argparse.Namespace) -> None:
    script = parse_server_script(args.script)
    server = await StandinServer(args.kind, args.model, script, args.disaggregated).start(args.port)
    print(json.dumps({"ready": True, "port": server.port}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m standins.standin_openai", allow_abbrev=False)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--kind", choices=["openai", "vllm", "sglang"], default="openai")
    parser.add_argument("--model", default="standin")
    parser.add_argument("--script", default="", help="see standins/openai_script.py")
    parser.add_argument("--disaggregated", action="store_true", help="as one of SGLang's prefill/decode pair")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
