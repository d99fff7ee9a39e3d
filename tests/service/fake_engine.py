"""A fake engine in the event loop of the test: real frames over a real socket, no model."""

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from emberline.balancer.endpoint import Endpoint
from emberline.net.link import Link
from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput, ErrorInfo, Unauthorized
from emberline.protocol.events import FinishReason, PromptLogprobs, TokenDelta, TokenLogprobs, Usage
from emberline.protocol.frames import (
    VERSION,
    Abort,
    CacheCommand,
    CacheResult,
    CalledTools,
    Drain,
    EngineInfo,
    EngineLoad,
    Heartbeat,
    Hello,
    Refused,
    SetRole,
    Step,
    Submit,
    Vocabulary,
    Welcome,
    WorkerRole,
    to_engine_decoder,
)
from emberline.protocol.request import EngineRequest

EOS = 2
Script = Callable[[EngineRequest], Sequence[int]]


def prompt_logprobs(n: int, n_top: int) -> PromptLogprobs:
    """Log-probabilities of n prompt tokens: -0.5 each, as the second best; the best ones are the tokens 10, 11, …"""
    top = b"".join(struct.pack("<I", 10 + place) for place in range(n_top))
    top_logprobs = b"".join(struct.pack("<f", -0.25 * (place + 1)) for place in range(n_top))
    return PromptLogprobs(struct.pack("<f", -0.5) * n, struct.pack("<I", 2) * n, top * n, top_logprobs * n)


class FakeEngine:
    """Answers every request with its script's token ids; `script = None` leaves it to the test to call `step`."""

    def __init__(self, path: Path, script: Script | None = None, *, name: str = "e0", **info: object) -> None:
        self.endpoint = Endpoint(name=name, address=f"unix:{path}", token="join")
        self.script = script
        self.cached = 0
        self.burst = 1  # tokens per step
        self.waited_s = 0.0  # in its queue, as it says
        self.submitted: list[EngineRequest] = []
        self.running: set[str] = set()  # sequences that have not ended, as its load reports say
        self.aborted: list[str] = []
        self.answers_aborts = True  # False: it is older than these answers, or busy with a step
        self.prefilled: dict[str, int] = {}  # prompt tokens computed before the first, by sequence; else all or none
        self._n_sent: dict[str, int] = {}  # output tokens, by sequence that runs
        self.called_tools: list[str] = []  # requests that did, as the client said
        self.vocabularies: list[Vocabulary] = []
        self.before_vocabulary: list[str] = []  # requests that arrived before the first vocabulary
        self.cache_commands: list[CacheCommand] = []
        self.links: set[_Link] = set()
        self.first_load = EngineLoad()  # in its Welcome
        self.lie: Callable[[Step], Sequence[Step]] = lambda step: (step,)  # the frames that it sends in place of one
        self.drained = False
        self.takes_roles = True  # False: it hangs when it is told to change its role
        self.versions = (VERSION,)  # of the protocol, that it speaks
        self.steps = 0
        self.heartbeat: Heartbeat | None = Heartbeat()  # None: it hangs
        self._beating: asyncio.Task[None] | None = None
        self.info = EngineInfo(
            **{  # type: ignore[arg-type]
                "model": "test",
                "fingerprint": "f" * 32,
                "context_len": 256,
                "vocab_size": 512,
                "eos_ids": (EOS,),
                "max_running": 8,
            }
            | info
        )
        self._server: asyncio.AbstractServer | None = None
        self._listener: socket.socket | None = None

    def listen(self) -> None:
        """On a free TCP port, from now on."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp:127.0.0.1:{self._listener.getsockname()[1]}"
        self.endpoint = msgspec.structs.replace(self.endpoint, address=address)

    async def start(self) -> "FakeEngine":
        path, _, _ = self.endpoint.split()
        loop = asyncio.get_running_loop()
        if path is not None:
            Path(path).unlink(missing_ok=True)
            self._server = await loop.create_unix_server(lambda: _Link(self), path)
        else:
            self._server = await loop.create_server(lambda: _Link(self), sock=self._listener)
        return self

    def beat_every(self, seconds: float) -> None:
        async def beat() -> None:
            while True:
                if self.heartbeat is not None:
                    for link in self.links:
                        link.send(self.heartbeat)
                await asyncio.sleep(seconds)

        self._beating = asyncio.create_task(beat())

    async def die(self) -> None:
        """As a crash looks from outside: the socket is gone, connections are closed."""
        if self._beating is not None:
            self._beating.cancel()
        if self._server is not None:
            self._server.close()
            self._server = None
        links = list(self.links)
        for link in links:
            link.drop("killed")
        await asyncio.gather(*(link.closed for link in links))

    def set_role(self, role: WorkerRole) -> None:
        if not self.takes_roles:
            return
        self.info = msgspec.structs.replace(self.info, role=role)
        for link in self.links:
            link.send(Welcome(self.info, EngineLoad(steps=self.steps)))

    def end_aborted(self, ids: Sequence[str]) -> None:
        """The terminal deltas of aborted sequences, as an engine sends them."""
        for sequence in [sequence for sequence in self.submitted if sequence.id in ids]:
            if (n_sent := self._n_sent.get(sequence.id, 0)) >= 0:
                n_prompt = tokens.count(sequence.prompt_ids) if n_sent else self.prefilled.get(sequence.id, 0)
                usage = Usage(prompt_tokens=n_prompt, completion_tokens=n_sent, partial=True)
                self.step(TokenDelta(sequence.id, finish="cancelled", usage=usage))

    def step(self, *deltas: TokenDelta) -> None:
        for delta in deltas:
            n_sent = self._n_sent.get(delta.id, 0) + len(delta.token_ids) // 4
            self._n_sent[delta.id] = n_sent if delta.finish is None else -1
        self.steps += 1
        self.running -= {delta.id for delta in deltas if delta.finish is not None}
        n = len(self.running)
        load = EngineLoad(running=n, steps=self.steps, kv_used_blocks=n, kv_total_blocks=1024)
        for link in self.links:
            link.n_sent += sum(len(delta.token_ids) // 4 for delta in deltas)
            for frame in self.lie(Step(list(deltas), load, link.n_sent)):
                link.send(frame)

    async def submission(self, n: int = 1) -> list[EngineRequest]:
        """Wait until `n` requests have arrived."""
        while len(self.submitted) < n:
            await asyncio.sleep(0.001)
        return self.submitted

    async def play(self, request: EngineRequest) -> None:
        assert self.script is not None
        ids, sampling = list(self.script(request)), request.sampling
        limit = len(ids) if sampling.max_tokens is None else sampling.max_tokens
        usage = Usage(prompt_tokens=tokens.count(request.prompt_ids), cached_by_tier={"device": self.cached})
        if sampling.prompt_logprobs is not None:
            n_scored = tokens.count(request.prompt_ids) - 1
            for n in (n_scored // 2, n_scored - n_scored // 2):  # as of two chunks of the prompt
                self.step(TokenDelta(request.id, prompt_logprobs=prompt_logprobs(n, sampling.prompt_logprobs)))
                await asyncio.sleep(0)
        if limit == 0:
            self.step(TokenDelta(request.id, finish="length", usage=usage))
        for start in range(0, min(limit, len(ids)), self.burst):
            if request.id in self.aborted:
                return
            chunk = ids[start : min(start + self.burst, limit)]
            last = start + len(chunk) >= min(limit, len(ids))
            finish: FinishReason | None = ("stop" if chunk[-1] == EOS else "length") if last else None
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = [
                    TokenLogprobs(i, -0.5, [(i, -0.5), (i + 1, -1.5)][: request.sampling.logprobs]) for i in chunk
                ]
            told = usage if start == 0 or last else None
            waited_s = self.waited_s if start == 0 else 0.0
            self.step(TokenDelta(request.id, tokens.pack(chunk), finish, told, logprobs, waited_s=waited_s))
            await asyncio.sleep(0)


class _Link(Link):
    @property
    def socket(self) -> socket.socket:
        assert self._transport is not None
        return self._transport.get_extra_info("socket")  # type: ignore[no-any-return]

    def write(self, data: bytes) -> None:
        """Send bytes that may be no frame."""
        assert self._transport is not None
        self._transport.write(data)

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self._engine = engine
        self.n_sent = 0  # output tokens
        self._tasks: set[asyncio.Task[None]] = set()

    def on_frame(self, payload: bytes) -> None:
        engine, message = self._engine, to_engine_decoder.decode(payload)
        if isinstance(message, Hello):
            self._greet(message)
        elif isinstance(message, Submit):
            engine.submitted += message.requests
            engine.running.update(request.id for request in message.requests)
            if engine.script is not None:
                for request in message.requests:
                    self._tasks.add(asyncio.ensure_future(engine.play(request)))
        elif isinstance(message, CalledTools):
            engine.called_tools += message.ids
        elif isinstance(message, Abort):
            engine.aborted += message.ids
            engine.running.difference_update(message.ids)
            if engine.answers_aborts:
                engine.end_aborted(message.ids)
        elif isinstance(message, Drain):
            engine.drained = True
        elif isinstance(message, CacheCommand):
            engine.cache_commands.append(message)
            self.send(CacheResult(message.number, {"device": 1}))
        elif isinstance(message, SetRole):
            engine.set_role(message.role)
        elif isinstance(message, Vocabulary):
            if not engine.vocabularies:
                engine.before_vocabulary = [request.id for request in engine.submitted]
            engine.vocabularies.append(message)

    def _greet(self, hello: Hello) -> None:
        if hello.version not in self._engine.versions:
            self.send(Refused(ErrorInfo(BadInput.kind, f"not version {hello.version}")))
        elif hello.token == self._engine.endpoint.token:
            self._engine.links.add(self)
            self.send(Welcome(self._engine.info, self._engine.first_load))
        else:
            self.send(Refused(ErrorInfo(Unauthorized.kind, "wrong token")))

    def on_close(self, reason: str) -> None:
        self._engine.links.discard(self)
        if not self._engine.links:
            self._engine.running.clear()
        for task in self._tasks:
            task.cancel()
