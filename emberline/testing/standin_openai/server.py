"""The stand-in itself: routes, replies, the two legs, and the faults."""

import asyncio
import os
import socket
import time
import uuid
from typing import Any, Literal

import msgspec

from emberline.testing.standin_openai.http import Connection, Request
from emberline.testing.standin_openai.replies import Cache, Meetings, Prompt, Script, encode
from emberline.testing.standin_openai.replies import parse as parse_script
from emberline.upstream.http_client import ConnectionFailed, ConnectionPool, parse

Kind = Literal["openai", "vllm", "sglang"]


class Failed(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Standin:
    """One server. Its meeting point (NIXL's side channel, the bootstrap server) is the same port."""

    def __init__(
        self, kind: Kind = "openai", model: str = "standin", script: Script | None = None, apart: bool = False
    ) -> None:
        self.kind = kind
        self.apart = apart  # started as SGLang's half of a pair: it takes no request without a room
        self.model = model
        self.script = script or Script()
        self.engine_id = uuid.uuid4().hex
        self.cache = Cache()
        self.meetings = Meetings(self.script.lease_s, self.script.meet_s)
        self.requests: list[dict[str, Any]] = []  # bodies, with the request id as "_id"; the newest last
        self.violations: list[str] = []  # what no balancer should have sent
        self.n_aborted = 0
        self.running = 0
        self.port = 0
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[Connection] = set()
        self._canned: dict[bool, bytes] = {}  # whole answers by whether they are streamed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> "Standin":
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._handle, self._connections), sock=listener
        )
        return self

    async def close(self) -> None:
        """As if killed: every connection is reset."""
        if self._server is not None:
            self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    # --- routes ------------------------------------------------------------------------------------------------------

    async def _handle(self, request: Request, connection: Connection) -> None:
        try:
            await self._route(request, connection)
        except Failed as error:
            body = {"error": {"message": str(error), "type": "scripted", "param": None, "code": error.status}}
            extra = "retry-after: 3\r\n" if error.status == 429 else ""
            connection.reply(error.status, encode(body), extra=extra)
        except asyncio.CancelledError:
            self.n_aborted += 1
            raise

    async def _route(self, request: Request, connection: Connection) -> None:
        path, _, query = request.path.partition("?")
        if path in ("/v1/chat/completions", "/v1/completions"):
            return await self._complete(request, connection, chat=path.startswith("/v1/chat"))
        if path == "/standin":
            return self._control(request, connection)
        if self.script.sick:
            raise Failed(500, "sick")
        if path == "/fetch":
            return await self._fetched(query, connection)
        answer = self._question(path)
        if answer is None:
            raise Failed(404, f"no {path} here")
        connection.reply(200, answer, "text/plain" if path == "/metrics" else "application/json")

    def _question(self, path: str) -> bytes | None:
        if path == "/v1/models":
            return encode({"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 8192}]})
        if path == "/health":
            return b""
        if path == "/metrics" and self.kind == "vllm":
            return (
                f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {float(self.running)}\n'
                f'vllm:num_requests_waiting{{engine="0",model_name="{self.model}"}} 0.0\n'
                f'vllm:kv_cache_usage_perc{{engine="0",model_name="{self.model}"}} 0.25\n'
                'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
            ).encode()
        if path == "/v1/loads" and self.kind == "sglang":
            core = {"num_running_reqs": self.running, "num_waiting_reqs": 0, "num_waiting_uncached_tokens": 0}
            return encode({"loads": [{**core, "num_used_tokens": 160, "max_total_num_tokens": 16000}]})
        if path == "/query":
            return encode({"0": {"engine_id": self.engine_id}})
        return None

    def _control(self, request: Request, connection: Connection) -> None:
        """How it stands; a POST changes the script."""
        if request.method == "POST":
            self.script = parse_script(request.body.decode())
        state = {
            "violations": self.violations,
            "leased": self.meetings.leased,
            "fetched": self.meetings.fetched,
            "aborted": self.n_aborted,
            "requests": len(self.requests),
        }
        connection.reply(200, encode(state))

    async def _fetched(self, query: str, connection: Connection) -> None:
        """Decode's stand-in comes for the blocks."""
        name, wait = query.removeprefix("name=").partition("&wait")[::2]
        n_tokens = await self.meetings.wait(name) if wait else self.meetings.fetch(name)
        if n_tokens is None:
            raise Failed(404, "nothing is held under that name")
        connection.reply(200, encode({"tokens": n_tokens}))

    # --- completions -------------------------------------------------------------------------------------------------

    def _can(self, body: bytes, chat: bool) -> bytes:
        streamed = b'"stream":true' in body or b'"stream": true' in body
        if streamed not in self._canned:
            self._canned[streamed] = _whole_answer(self.script.tokens, self.model, chat, streamed)
        return self._canned[streamed]

    async def _complete(self, request: Request, connection: Connection, chat: bool) -> None:
        script = self.script
        failing = script.faulty
        if failing and script.times > 0 and _has_fault(script):
            script.times -= 1
        if failing and script.hang:
            await asyncio.sleep(3600)
        if failing and script.garbage:
            connection.transport.write(b"\x00\x01 what is HTTP?\r\n\r\n")
            return connection.transport.close()
        if failing and script.status:
            raise Failed(script.status, script.message)
        if script.canned:
            return connection.transport.write(self._can(request.body, chat))
        body = msgspec.json.decode(request.body)
        self.requests.append({**body, "_id": request.headers.get("x-request-id", "")})
        del self.requests[:-1000]
        if body.get("model") != self.model:
            raise Failed(404, f"The model `{body.get('model')}` does not exist.")
        self.running += 1
        try:
            await Completion(self, body, connection, chat, failing).run()
        finally:
            self.running -= 1


def _whole_answer(words: int, model: str, chat: bool, streamed: bool) -> bytes:
    """The bytes of an answer to a prompt that nobody has read."""
    recorder = _Recorder()
    body = {"model": model, "messages": [], "stream": streamed, "stream_options": {"include_usage": True}}
    made = Completion(Standin(model=model, script=Script(tokens=words)), body, recorder, chat, False)
    made.answer_at_once()
    return recorder.written


class _Recorder(Connection):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.transport = self  # type: ignore[assignment]

    def write(self, data: bytes) -> None:
        self.written += data


def _has_fault(script: Script) -> bool:
    return bool(
        script.status
        or script.hang
        or script.garbage
        or script.bad_json
        or script.no_params
        or script.no_done
        or max(script.cut_after, script.error_after, script.die_after) >= 0
    )


class Completion:
    """One request on its way through the stand-in."""

    def __init__(
        self, standin: Standin, body: dict[str, Any], connection: Connection, chat: bool, failing: bool
    ) -> None:
        self._standin = standin
        self._script = standin.script
        self._body = body
        self._connection = connection
        self._chat = chat
        self._failing = failing
        self._prompt = Prompt(body)
        self._cached = 0
        self._params: dict[str, Any] | None = None
        self._hands_over = ""  # the name under which decode will come

    async def run(self) -> None:
        await self._meet()
        if self._script.ttft_ms:
            await asyncio.sleep(self._script.ttft_ms / 1000)
        most = self._body.get("max_completion_tokens") or self._body.get("max_tokens") or self._script.tokens
        words = list(self._prompt.words(min(self._prompt.n_said + most, self._script.tokens)))
        if self._body.get("stream"):
            await self._stream(words)
        else:
            self._whole(words)

    def answer_at_once(self) -> None:
        words = list(self._prompt.words(self._script.tokens))
        if not self._body.get("stream"):
            return self._whole(words)
        self._connection.begin_stream()
        self._connection.chunk(b"".join(self._events(words)))
        self._connection.end_stream()

    # --- prefill and decode ------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        standin, body = self._standin, self._body
        params = body.get("kv_transfer_params")
        if isinstance(params, dict) and standin.kind != "vllm":
            standin.violations.append("kv_transfer_params to a server that is not vLLM")
        elif isinstance(params, dict) and params.get("do_remote_decode"):
            self._prefill(params)
        elif isinstance(params, dict) and params.get("do_remote_prefill"):
            await self._decode(params)
        elif "bootstrap_room" in body:
            await self._bootstrap()
        elif standin.apart:
            standin.violations.append("no room")
            raise Failed(400, "a disaggregated server needs bootstrap_room")
        else:
            self._cached = standin.cache.cached_tokens(self._prompt)

    def _prefill(self, params: dict[str, Any]) -> None:
        standin, body = self._standin, self._body
        wrong = [name for name in ("stream_options", "min_tokens") if name in body]
        if body.get("stream") is not False or body.get("max_tokens") != 1 or wrong:
            standin.violations.append(f"prefill leg: stream, max_tokens or {wrong}")
        if body.get("max_completion_tokens", 1) != 1:
            standin.violations.append("prefill leg: max_completion_tokens")
        self._cached = standin.cache.cached_tokens(self._prompt)
        name = params.get("transfer_id") or f"req-{uuid.uuid4().hex}"
        standin.meetings.hold(name, self._prompt.n_tokens)
        if "transfer_id" in params or (self._failing and self._script.no_params):
            return
        self._params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(len(self._prompt.blocks())))],
            "remote_engine_id": standin.engine_id,
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": standin.port,
            "tp_size": 1,
        }

    async def _decode(self, params: dict[str, Any]) -> None:
        if "transfer_id" in params:
            origin, name, wait = parse(params["remote_bootstrap_addr"]), params["transfer_id"], "&wait"
        else:
            origin = parse(f"http://{params['remote_host']}:{params['remote_port']}")
            name, wait = params["remote_request_id"], ""
        n_tokens = await _ask(origin, f"/fetch?name={name}{wait}")
        if n_tokens != self._prompt.n_tokens:
            raise Failed(500, f"KV of {n_tokens} tokens for a prompt of {self._prompt.n_tokens}")
        self._standin.cache.cached_tokens(self._prompt)
        self._cached = self._prompt.n_tokens - 1 if self._script.lies == "all" else 0

    async def _bootstrap(self) -> None:
        """Both legs bring the same body: whose address it names is prefill."""
        standin, body = self._standin, self._body
        host, port, room = (_first(body[f"bootstrap_{name}"]) for name in ("host", "port", "room"))
        name = f"room-{room}"
        self._cached = standin.cache.cached_tokens(self._prompt)
        if port == standin.port:
            standin.meetings.hold(name, self._prompt.n_tokens)
            if not await standin.meetings.fetched_by(name):
                raise Failed(500, "decode never came to the room")
            return
        n_tokens = await _ask(parse(f"http://{host}:{port}"), f"/fetch?name={name}&wait")
        if n_tokens != self._prompt.n_tokens:
            raise Failed(500, f"KV of {n_tokens} tokens for a prompt of {self._prompt.n_tokens}")

    # --- answers -----------------------------------------------------------------------------------------------------

    def _finish(self, words: list[str]) -> str:
        most = self._body.get("max_completion_tokens") or self._body.get("max_tokens")
        return "length" if most == len(words) else "stop"

    @property
    def _usage(self) -> dict[str, Any]:
        details = None if self._standin.kind == "vllm" and not self._cached else {"cached_tokens": self._cached}
        return {"prompt_tokens": self._prompt.n_tokens, "prompt_tokens_details": details}

    def _counted(self, n_words: int) -> dict[str, Any]:
        usage = self._usage
        total = usage["prompt_tokens"] + n_words
        return {**usage, "completion_tokens": n_words, "total_tokens": total}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self._chat else "cmpl"
        made = f"{prefix}-{self._body.get('_id') or uuid.uuid4().hex}"
        return {"id": made, "object": kind, "created": int(time.time()), "model": self._standin.model}

    def _whole(self, words: list[str]) -> None:
        script = self._script
        if self._failing and max(script.cut_after, script.error_after) >= 0:
            return self._connection.transport.abort()
        if self._failing and script.die_after >= 0:
            os._exit(9)
        text, finish = "".join(words), self._finish(words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        body = self._head("chat.completion" if self._chat else "text_completion")
        body |= {"choices": [choice], "usage": self._counted(len(words)), "kv_transfer_params": self._params}
        answer = encode(body)
        self._connection.reply(200, answer[: len(answer) // 2] if self._failing and script.bad_json else answer)

    async def _stream(self, words: list[str]) -> None:
        script, connection = self._script, self._connection
        events = self._events(words)
        connection.begin_stream()
        if not (script.itl_ms or script.split or (self._failing and _has_fault(script))):
            connection.chunk(b"".join(events))
            return connection.end_stream()
        for number, event in enumerate(events):
            if self._failing and self._faulted(number - 1):
                return
            for start in range(0, len(event), script.split or len(event)):
                connection.chunk(event[start : start + (script.split or len(event))])
                if script.split:
                    await asyncio.sleep(0)
            if script.itl_ms:
                await asyncio.sleep(script.itl_ms / 1000)
        connection.end_stream()

    def _faulted(self, n_words: int) -> bool:
        script, connection = self._script, self._connection
        if n_words == script.die_after and n_words >= 0:
            os._exit(9)
        if n_words == script.cut_after and n_words >= 0:
            connection.transport.abort()
            return True
        if n_words == script.error_after and n_words >= 0:
            connection.chunk(b'data: {"error": {"message": "scripted", "code": 500}}\n\n')
            connection.end_stream()
            return True
        return False

    def _events(self, words: list[str]) -> list[bytes]:
        head = self._head("chat.completion.chunk" if self._chat else "text_completion")
        opening = b"data: " + encode(head)[:-1] + b',"choices":['
        made: list[bytes] = []
        if self._chat:
            made.append(opening + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n')
        before, after = (b'{"index":0,"delta":{"content":', b"}") if self._chat else (b'{"index":0,"text":', b"")
        made += [opening + before + encode(word) + after + b',"finish_reason":null}]}\n\n' for word in words]
        if self._failing and self._script.bad_json:
            made.insert(2, b"data: {never ends\n\n")
        last = b'"delta":{}' if self._chat else b'"text":""'
        finish = self._finish(words).encode()
        made.append(opening + b'{"index":0,' + last + b',"finish_reason":"' + finish + b'"}]}\n\n')
        if (self._body.get("stream_options") or {}).get("include_usage"):
            made.append(opening + b'],"usage":' + encode(self._counted(len(words))) + b"}\n\n")
        if not (self._failing and self._script.no_done):
            made.append(b"data: [DONE]\n\n")
        return made


async def _ask(origin: Any, path: str) -> int | None:
    pool = ConnectionPool(origin)
    try:
        status, body = await pool.get(path, 30.0)
        return int(msgspec.json.decode(body)["tokens"]) if status == 200 else None
    except ConnectionFailed:
        return None
    finally:
        pool.close()


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value
