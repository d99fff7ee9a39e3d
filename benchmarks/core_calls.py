"""Calls, JSON passes and look-ups of one request on the core's event loop: `python -m benchmarks.core_calls`.

CPU time on a busy machine is noise; these counts are exact. The real app, service, accounts, gateways and store run in
this process, without the HTTP server, over a stand-in engine in a process of its own and a paced OpenAI-compatible
server in a thread of its own. `sys.setprofile` counts on the event loop's thread alone:

calls           functions of the package entered; a coroutine counts again each time it is resumed
calls per read  those that one more read of a relayed reply costs
json            JSON decoder calls by functions that hold, in a variable or a field of one, half of the request's body
look_ups        times that a model's name was resolved, or a gateway's route planned

The paced server sends a piece of its reply once the app has sent on the one before: every piece is a read of its own.
Each request is repeated until its fewest calls have come up several times: heartbeats and timers that fall into a
request only add to it.
"""

import argparse
import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

import emberline
from benchmarks import emberline_contender
from benchmarks.report import markdown
from emberline.accounts.account_service import AccountService
from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.balancer.endpoint import Endpoint
from emberline.catalog.model_card import ModelCard, PathSource
from emberline.config import ProviderConfig
from emberline.gateway.gateways import GatewayService
from emberline.net.http_server import DISCONNECTED
from emberline.protocol.price import Price
from emberline.service import Served, open_service
from emberline.service.service_factory import DATABASE
from emberline.store import open_store
from emberline.text.text_model import TextModel
from emberline.upstream.models import discover
from emberline.upstream.providers.directory import ProviderDirectory
from emberline.upstream.servers.client import UpstreamConfig

PACKAGE = str(Path(emberline.__file__).parent) + os.sep
LOCAL, REMOTE = "@cf/bench/local", "remote"
PROMPT_BYTES = 4096
SHORT, LONG = 3, 9  # pieces of a paced reply
SEEN, MAX_REPEATS = 4, 40  # a count is taken once it has come up so many times and none was smaller
PATIENCE_S = 60.0
LOOK_UPS = {  # functions that turn a model's name into a model, by file
    "service/models.py": {"find"},
    "gateway/routing.py": {"plan"},
}
JSON_DECODERS = (msgspec.json.decode, json.loads)


@dataclass(slots=True)
class Profile:
    """What one request did on the event loop's thread."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    n_json: int = 0

    @property
    def n_calls(self) -> int:
        return self.calls.total()

    @property
    def n_look_ups(self) -> int:
        return sum(
            n for code, n in self.calls.items() if code.co_name in LOOK_UPS.get(code.co_filename[len(PACKAGE) :], ())
        )

    @property
    def functions(self) -> set[tuple[str, int]]:
        """Path and first line of every function that was called."""
        return {(code.co_filename, code.co_firstlineno) for code in self.calls}


@contextmanager
def profiled(body: bytes) -> Any:
    """Profile this thread; `body` is the request's."""
    profile, calls = Profile(), Counter[CodeType]()
    profile.calls = calls

    def record(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code.co_filename.startswith(PACKAGE):
                calls[frame.f_code] += 1
        elif event == "c_call" and _is_json_decoder(argument) and frame.f_code.co_filename.startswith(PACKAGE):
            profile.n_json += any(_size(value) >= len(body) // 2 for value in _held(frame.f_locals.values()))

    sys.setprofile(record)
    try:
        yield profile
    finally:
        sys.setprofile(None)


def _is_json_decoder(function: Any) -> bool:
    return function in JSON_DECODERS or isinstance(getattr(function, "__self__", None), msgspec.json.Decoder)


def _held(values: Iterable[Any]) -> Iterator[Any]:
    """Values, and those in their fields if they are structs or dicts."""
    for value in values:
        yield value
        if isinstance(value, msgspec.Struct):
            yield from (getattr(value, name) for name in value.__struct_fields__)
        elif isinstance(value, dict):
            yield from value.values()


def _size(value: Any) -> int:
    return len(bytes(value)) if isinstance(value, bytes | bytearray | memoryview | msgspec.Raw) else 0


class PacedServer:
    """An OpenAI-compatible server in a thread of its own, whose reply goes on when `sent_on` has been called.

    It answers with `pieces` events, and then with the usage and the end marker in one piece.
    """

    def __init__(self) -> None:
        self.pieces = 1
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._go = asyncio.Semaphore(0)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def sent_on(self, n_events: int) -> None:
        for _ in range(n_events):
            self._loop.call_soon_threadsafe(self._go.release)

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = sum(int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:"))
                await reader.readexactly(length)
                if head.startswith(b"POST"):
                    await self._reply(writer)
                else:
                    listed = json.dumps({"object": "list", "data": [{"id": REMOTE, "object": "model"}]}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(listed), listed))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _reply(self, writer: asyncio.StreamWriter) -> None:
        self._go = asyncio.Semaphore(0)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + _chunk(_event(delta={"role": "assistant", "content": ""})))
        for number in range(self.pieces):
            await self._go.acquire()
            writer.write(_chunk(_event(delta={"content": f" w{number}"})))
        await self._go.acquire()
        usage = {"prompt_tokens": 1000, "completion_tokens": self.pieces, "total_tokens": 1000 + self.pieces}
        last = _event(delta={}, finish_reason="stop") + _event(usage=usage) + b"data: [DONE]\n\n"
        writer.write(_chunk(last) + b"0\r\n\r\n")


def _event(usage: Any = None, **choice: Any) -> bytes:
    choices = [{"index": 0, "finish_reason": None, **choice}] if choice else []
    event = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": REMOTE, "choices": choices}
    return b"data: " + json.dumps(event | ({} if usage is None else {"usage": usage})).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


class CoreBench:
    """The core in this process, over a stand-in engine and a paced server."""

    def __init__(self, app: App, server: PacedServer) -> None:
        self._app = app
        self._server = server

    async def profile(
        self, path: str, body: dict[str, Any], pieces: int = SHORT, most_calls: float = math.inf
    ) -> Profile:
        """Return the profile with the fewest calls among several of the same streamed request.

        More than `most_calls` are believed only after all repeats: on a busy machine the engine's frames come one by
        one, time after time, and each wakes the core.
        """
        await self._request(path, body, pieces)  # fills caches
        profiles: list[Profile] = []
        while True:
            profiles.append(await self._request(path, body, pieces))
            fewest = min(profiles, key=lambda one: one.n_calls)
            n_seen = sum(one.n_calls == fewest.n_calls for one in profiles)
            if (n_seen >= SEEN and fewest.n_calls <= most_calls) or len(profiles) == MAX_REPEATS:
                return fewest

    async def _request(self, path: str, fields: dict[str, Any], pieces: int) -> Profile:
        self._server.pieces = pieces
        body = json.dumps(fields).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"host", b"localhost"),
        ]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            DISCONNECTED: asyncio.get_running_loop().create_future(),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        answer = bytearray()
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return messages.pop() if messages else await asyncio.Future()

        async def send(message: Mapping[str, Any]) -> None:
            statuses.append(message.get("status", 0))
            piece = message.get("body", b"")
            answer.extend(piece)
            self._server.sent_on(piece.count(b"data: "))

        async with asyncio.timeout(PATIENCE_S):
            with profiled(body) as profile:
                await self._app(scope, receive, send)
        assert statuses[0] == 200, bytes(answer)
        assert answer.endswith((b"data: [DONE]\n\n", b'{"type":"message_stop"}\n\n')), bytes(answer)
        return profile


@asynccontextmanager
async def core_bench(text: TextModel, folder: Path) -> AsyncIterator[CoreBench]:
    """Open the core and its stand-ins, with their files in `folder`."""
    async with AsyncExitStack() as stack:
        server = PacedServer()
        stack.callback(server.close)
        endpoint = Endpoint(name="e0", address=f"unix:{folder}/engine.sock", token="join")
        stack.enter_context(_standin_engine(endpoint.address))
        card = ModelCard(id=LOCAL, description="", author="", context_window=8192, source=PathSource(""), created_at="")
        store = await open_store(folder / DATABASE)
        stack.push_async_callback(store.close)
        secret = Secret.open(folder)
        accounts = AccountService(store, secret)
        stack.push_async_callback(accounts.close)
        await accounts.open()
        relayed = Endpoint(name="remote", address=server.url, kind="openai", models=(REMOTE,))
        provider = ProviderConfig(name="provider", url=f"{server.url}/v1", key="sk-benchmark")
        upstreams = await discover([UpstreamConfig(endpoint=relayed)])
        service = await open_service(
            [Served(card, text, (endpoint,))],
            data_dir=folder,
            store=store,
            upstreams=upstreams,
            providers=ProviderDirectory([provider], keys=accounts.provider_keys),
            directory=accounts.directory,
            prices={f"provider/{REMOTE}": Price(input=1_000_000, output=2_000_000)},
        )
        stack.push_async_callback(service.close)
        assert await service.ready(PATIENCE_S)
        for upstream in upstreams:
            assert await upstream.wait_connected(PATIENCE_S), upstream.problem
        gateways = GatewayService(store, [])
        stack.push_async_callback(gateways.close)
        await gateways.open()
        auth = Authenticator(secret, directory=accounts.directory, required=False)
        yield CoreBench(App(service, ApiSettings(auth), accounts=accounts, gateways=gateways), server)


@contextmanager
def _standin_engine(address: str) -> Any:
    command = [sys.executable, "-m", "standins.standin_engine", "--name", LOCAL, "--script", "say=count"]
    process = subprocess.Popen(
        [*command, "--socket", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "EMBERLINE_WORKER_TOKEN": "join"},
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["ready"]
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
        process.stdout.close()


CHAT, MESSAGES, GATEWAY = "/v1/chat/completions", "/v1/messages", "/v1/local/default/compat/chat/completions"


def chat(model: str, **fields: Any) -> dict[str, Any]:
    """A streamed chat of 4 KB."""
    words = ("tell me everything about prefill and decode, please. " * 80)[:PROMPT_BYTES]
    return {"model": model, "stream": True, "messages": [{"role": "user", "content": words}], **fields}


async def request_profiles(
    text: TextModel, folder: Path, most_calls: Mapping[str, float] | None = None
) -> dict[str, Profile]:
    """Return a profile of every kind of request that a budget is for; `most_calls` are the budgets of calls."""
    most = most_calls or {}
    async with core_bench(text, folder) as bench:
        return {
            "local": await bench.profile(CHAT, chat(LOCAL, max_tokens=1), SHORT, most.get("local", math.inf)),
            "relayed": await bench.profile(CHAT, chat(REMOTE), SHORT, most.get("relayed", math.inf)),
            "relayed, longer": await bench.profile(CHAT, chat(REMOTE), LONG),
            "gateway": await bench.profile(GATEWAY, chat(f"provider/{REMOTE}"), SHORT, most.get("gateway", math.inf)),
            "gateway, longer": await bench.profile(GATEWAY, chat(f"provider/{REMOTE}"), LONG),
            "messages": await bench.profile(MESSAGES, chat(f"provider/{REMOTE}", max_tokens=100)),
        }


def counts(profiles: Mapping[str, Profile]) -> dict[str, dict[str, int]]:
    """The figures that have budgets, by kind of request."""
    found: dict[str, dict[str, int]] = {}
    for name in ("local", "relayed", "gateway"):
        profile, longer = profiles[name], profiles.get(f"{name}, longer")
        found[name] = {"calls": profile.n_calls, "json": profile.n_json, "look_ups": profile.n_look_ups}
        if longer is not None:
            found[name]["calls_per_read"] = round((longer.n_calls - profile.n_calls) / (LONG - SHORT))
    # Several events of this API belong to one of the server's, so the server's pace does not fix the number of reads.
    found["messages"] = {"json": profiles["messages"].n_json, "look_ups": profiles["messages"].n_look_ups}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every function with its calls")
    parser.add_argument("--json", type=Path, help="write the counts there")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    text = TextModel.load(emberline_contender.default_gguf())
    with tempfile.TemporaryDirectory() as folder:
        profiles = asyncio.run(request_profiles(text, Path(folder)))
    if options.list:
        for name, profile in profiles.items():
            print(name)
            for code, n in sorted(profile.calls.items(), key=lambda item: -item[1]):
                print(f"{n:6} {code.co_filename[len(PACKAGE) :]}:{code.co_firstlineno} {code.co_qualname}")
    found = counts(profiles)
    titles = ["calls", "json", "look_ups", "calls_per_read"]
    rows = [[name, *(str(row.get(title, "-")) for title in titles)] for name, row in found.items()]
    print(markdown(["streamed chat", *titles], rows))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
