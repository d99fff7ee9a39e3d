"""The connection to one engine worker: kept alive, shared by all requests on that worker."""

import asyncio
import itertools
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from emberline.balancer.endpoint import Capacity, Endpoint, WorkerListener
from emberline.balancer.load_reports import implausible
from emberline.balancer.stall_detector import StallDetector
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.cluster.worker_checks import Exclusion, RequestProgress, StepCheck
from emberline.net.link import Link, dial
from emberline.net.periodic import stop
from emberline.protocol.encoding import EncodeParams
from emberline.protocol.errors import (
    BadInput,
    Conflict,
    EmberlineError,
    EngineLost,
    ErrorInfo,
    Unavailable,
    from_info,
)
from emberline.protocol.events import TokenDelta
from emberline.protocol.frames import (
    OLDEST_VERSION,
    VERSION,
    Abort,
    CacheCommand,
    CacheResult,
    CalledTools,
    Drain,
    EngineInfo,
    EngineLoad,
    FrameError,
    Heartbeat,
    Hello,
    KVEvents,
    Refused,
    SetRole,
    Step,
    Submit,
    Vocabulary,
    WatchKV,
    Welcome,
    WorkerRole,
    decode,
    from_engine_decoder,
)
from emberline.protocol.prediction import PredictParams
from emberline.protocol.request import EngineRequest, Priority, SamplingParams
from emberline.protocol.speech import TranscribeParams
from emberline.protocol.token_ids import pack


class EngineStream:
    """The deltas of a request's sequences, in order. The engine's connection fills it, one consumer drains it.

    A list and a future, not a queue: there is at most one waiter, and deltas that arrive before it runs are taken
    together.
    """

    __slots__ = ("_client", "_deltas", "_error", "_loop", "_open_ids", "_waiter", "begun")

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._deltas: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: EmberlineError | None = None
        self._open_ids: set[str] = set()
        self.begun = False  # a token has come

    def submit(self, requests: list[EngineRequest]) -> None:
        """Add sequences to this stream. Unavailable when the engine is not connected."""
        self._client.submit(self, requests)
        self._open_ids.update(request.id for request in requests)

    async def next(self) -> list[TokenDelta]:
        """Everything that has arrived, at least one delta; raises once the stream has failed and is empty."""
        while not self._deltas:
            if self._error is not None:
                raise self._error
            assert self._open_ids, "every sequence of the stream has ended"
            await self._wait()
        deltas = self._deltas
        self._deltas = []
        return deltas

    async def _wait(self) -> None:
        """Return when a delta arrives or the stream fails."""
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self, sequence_id: str) -> None:
        """Stop one sequence; nothing more of it is delivered."""
        if sequence_id in self._open_ids:
            self._open_ids.discard(sequence_id)
            self._deltas = [delta for delta in self._deltas if delta.id != sequence_id]
            self._client.abort([sequence_id])

    def close(self) -> None:
        """Abort what still runs."""
        if self._open_ids:
            self._client.abort(list(self._open_ids))
            self._open_ids.clear()

    async def end(self) -> None:
        """Abort what still runs and wait for the terminal deltas, or until the connection is lost. The deltas that
        nobody has read are then in `unread`."""
        if self._open_ids:
            self._client.request_abort(list(self._open_ids))
        while self._open_ids and self._error is None:
            await self._wait()

    @property
    def unread(self) -> list[TokenDelta]:
        """Deltas that have arrived and were not returned by `next`."""
        return self._deltas

    # --- called by the connection ------------------------------------------------------------------------------------

    def deliver(self, delta: TokenDelta) -> None:
        self.begun = self.begun or bool(delta.token_ids)
        if delta.finish is not None:
            self._open_ids.discard(delta.id)
        self._deltas.append(delta)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: EmberlineError) -> None:
        """End the stream with an error; what has been delivered is still handed out first."""
        if self._error is None:
            self._error = error
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


_CANARY_TOKENS = 4  # of the canary's prompt
_ROLES_SINCE = 6  # version of the protocol

log = logging.getLogger("emberline.balancer")


def _first_version(endpoint: Endpoint) -> int:
    """The protocol version to begin with; if the worker refuses it, the client tries the other one."""
    return min(VERSION, endpoint.version or VERSION)


class Sink(Protocol):
    """Receiver of a sequence's deltas."""

    def deliver(self, delta: TokenDelta) -> None: ...

    def fail(self, error: EmberlineError) -> None: ...


class EngineClient:
    """Connects and reconnects, submits sequences, delivers deltas. A lost connection fails its streams."""

    def __init__(
        self,
        endpoint: Endpoint,
        tls: ssl.SSLContext | None = None,
        timings: Timings = DEFAULTS,
        exclusion: Exclusion | None = None,
    ) -> None:
        """`exclusion`: for how long the worker is not connected to, after it said what cannot be true."""
        endpoint.split()  # raises now if the address is malformed
        self._exclusion = Exclusion() if exclusion is None else exclusion
        self._progress = RequestProgress(timings.no_step_s, timings.no_work_s, timings.stalls.max_gap_s)
        self.timings = timings
        self._tls = tls
        self.endpoint = endpoint
        self.info: EngineInfo | None = None  # of the last Welcome; outlives the connection
        self.load = EngineLoad()
        self.problem = "not connected yet"  # empty while connected
        self.closing = False  # the server ends: requests do not move to other workers
        self.version = _first_version(endpoint)  # of the protocol, that both sides speak
        self._wanted_role: WorkerRole | None = None  # None: the one that the worker was started with
        self.vocabulary: Callable[[], Vocabulary] | None = None  # of the model; engines need it for grammars
        self.listener: WorkerListener | None = None
        self.on_stall: Callable[[str], None] | None = None  # called with the engine's name when it hangs
        self.stalls = StallDetector(timings.stalls)
        self._suspect = ""  # why it was given up; empty once a canary generation has succeeded
        self._link: _EngineLink | None = None
        self._streams: dict[str, Sink] = {}  # by sequence id
        self._commands: dict[int, asyncio.Future[CacheResult]] = {}  # on its cache that run, by number
        self._command_numbers = itertools.count()
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def progress_s(self) -> float:
        """Monotonic time of the last step or welcome."""
        return self._progress.last_s

    @property
    def connected(self) -> bool:
        return self._link is not None

    @property
    def n_streams(self) -> int:
        """Number of sequences that run, or wait, on this engine for this process."""
        return len(self._streams)

    def start(self) -> None:
        """Connect, and stay connected, in the background. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._stay_connected(), name=f"engine {self.name}")

    async def wait_connected(self, timeout_s: float) -> bool:
        if self._link is not None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, server_ends: bool = False) -> None:
        """Cut the connection. Its requests move to other workers, unless the server itself ends."""
        self.closing |= server_ends
        await stop(self._task)
        if self._link is not None:
            self.problem = "closed"
            self._link.drop("closed")

    # --- for streams -------------------------------------------------------------------------------------------------

    def stream(self, requests: list[EngineRequest]) -> EngineStream:
        """Submit sequences and receive their deltas. Unavailable when the engine is not connected."""
        stream = EngineStream(self)
        stream.submit(requests)
        return stream

    def submit(self, stream: Sink, requests: list[EngineRequest]) -> None:
        if self._link is None:
            raise Unavailable(f"engine {self.name} is not connected: {self.problem}", retry_after_s=1)
        if not self._streams:  # until now there was nothing to be told of
            self._progress.last_s, self._progress.n_advances = time.monotonic(), 0
        for request in requests:
            assert request.id not in self._streams, f"sequence id {request.id} is in use"
            self._streams[request.id] = stream
        if any(request.grammar for request in requests):
            self.send_vocabulary()
        self._link.send(Submit(requests))

    def send_vocabulary(self) -> None:
        """Once per connection: grammars need it, and an engine takes a moment to index it."""
        if self._link is not None and not self._link.has_vocabulary and self.vocabulary is not None:
            self._link.send(self.vocabulary())
            self._link.has_vocabulary = True

    def end_worker(self, limit_s: float, restart: bool = False) -> None:
        """Ask the engine to drain, for all its clients, and to end its process: so that it is started again, or not."""
        if self._link is not None:
            self._link.send(Drain(limit_s, restart))

    @property
    def role(self) -> WorkerRole:
        return self.endpoint.role if self.info is None else self.info.role

    @property
    def decodes(self) -> bool:
        """And will: it was not told to be for prefill alone."""
        return "prefill" not in (self.role, self._wanted_role)

    def check_role(self, role: WorkerRole) -> None:
        """Conflict: the worker cannot have it. Nothing is known of one that was never connected."""
        if self.info is None or role == self.info.role:
            return
        if self.version < _ROLES_SINCE:
            raise Conflict(
                f"{self.name} runs an older release (protocol version {self.version}), whose role is fixed: upgrade it"
            )
        if role != "both" and not self.info.transfers:
            raise Conflict(
                f"{self.name} cannot have the role {role}: it does not receive KV (workers of models that "
                "generate no text do not; on a GPU, one that was started with role both and without --join does not)"
            )

    def set_role(self, role: WorkerRole) -> None:
        """The worker gets this role, and gets it again when it has restarted. It says when it has it."""
        self._wanted_role = role
        self._send_role()

    def _send_role(self) -> None:
        wanted, link = self._wanted_role, self._link
        if link is not None and wanted not in (None, self.role) and self.version >= _ROLES_SINCE:
            assert wanted is not None
            link.send(SetRole(wanted))

    def abort(self, ids: list[str]) -> None:
        """Abort sequences; nothing more of them is delivered."""
        for sequence_id in ids:
            self._streams.pop(sequence_id, None)
        self.request_abort(ids)

    def request_abort(self, ids: list[str]) -> None:
        """Abort sequences, whose streams still receive everything up to the terminal deltas."""
        if self._link is not None:
            self._link.send(Abort(ids))

    async def command_cache(self, command: CacheCommand) -> CacheResult:
        """Purge, export or import cached KV. The command's number is set here. Unavailable where the worker is not
        connected, or lost meanwhile; its own error is raised."""
        if self._link is None:
            raise Unavailable(f"engine {self.name} is not connected: {self.problem}", retry_after_s=1)
        command.number = next(self._command_numbers)
        done: asyncio.Future[CacheResult] = asyncio.get_running_loop().create_future()
        self._commands[command.number] = done
        self._link.send(command)
        try:
            result = await done
        finally:
            del self._commands[command.number]
        if result.error is not None:
            raise from_info(result.error)
        return result

    def called_tools(self, ids: list[str]) -> None:
        """A hint; it is lost with the connection."""
        if self._link is not None:
            self._link.send(CalledTools(ids))

    # --- for the link ------------------------------------------------------------------------------------------------

    def welcomed(self, link: "_EngineLink", welcome: Welcome) -> None:
        """An engine that hung must generate a token first, before the core sends it requests again."""
        self.stalls.connected(time.monotonic())
        self.info, self.load = welcome.info, welcome.load
        if self._suspect and self.listener is not None:
            self.problem = f"{self._suspect}; a canary request is running"
            link.send_canary(welcome)
        else:
            self.trusted(link, welcome)

    def trusted(self, link: "_EngineLink", welcome: Welcome) -> None:
        self.problem = self._suspect = ""
        self._progress.last_s, self._progress.n_advances = time.monotonic(), 0
        self._link = link
        link.trusted = True
        self._ready.set()
        self._send_role()
        if self.listener is not None:
            self._joined(link, welcome)
            link.send(WatchKV())
        log.info("engine %s connected", self.name, extra={"model": welcome.info.model, "device": welcome.info.device})

    def changed(self, link: "_EngineLink", welcome: Welcome) -> None:
        """The engine has another role."""
        self.info = welcome.info
        if self.listener is not None and link is self._link:
            self._joined(link, welcome)

    def _joined(self, link: "_EngineLink", welcome: Welcome) -> None:
        assert self.listener is not None
        endpoint = msgspec.structs.replace(self.endpoint, role=welcome.info.role)
        capacity = Capacity.of(welcome.info, round_trip_s=link.round_trip_s())
        self.listener.joined(endpoint, capacity, welcome.load)

    def refused(self, error: ErrorInfo) -> None:
        """Perhaps because of the version: the next time, the other one is tried."""
        if error.kind == BadInput.kind:
            self.version = OLDEST_VERSION if self.version == VERSION else VERSION

    def absorb(self, step: Step) -> None:
        """The hot path: runs once a step, its loop once a token."""
        self.load = step.load
        self._progress.last_s, self._progress.n_advances = time.monotonic(), 0
        if self.listener is not None:
            self.listener.reported(self.endpoint.name, step.load)
        streams = self._streams
        for delta in step.deltas:
            stream = streams.get(delta.id)
            if stream is None:
                continue  # aborted, and the engine did not know yet
            if delta.finish is not None:
                del streams[delta.id]
            stream.deliver(delta)

    def distrust(self, link: "_EngineLink", why: str) -> None:
        """Cut the connection to a worker that said what cannot be true. Its requests move to others at once, and it is
        not connected to for a while; then it has to pass a canary request first."""
        seconds = self._exclusion.extend(self.timings.exclusion_s)
        self._suspect = why
        log.error("engine %s is not believed: %s; it is left out for %.0f s", self.name, why, seconds)
        if self.listener is not None:
            self.listener.distrusted(self.name)
        link.distrusted = True
        link.drop(why)
        if self.on_stall is not None:  # a worker of this machine is started anew
            self.on_stall(self.name)

    def lost(self, link: "_EngineLink", reason: str) -> None:
        if reason != self.problem:
            log.warning("engine %s: %s", self.name, reason, extra={"streams": len(self._streams)})
        self.problem = reason
        if self._link is not link:
            return
        self._link = None
        self.version = _first_version(self.endpoint)  # another release may be there next
        self._ready.clear()
        streams, self._streams = set(self._streams.values()), {}
        for done in self._commands.values():
            if not done.done():
                done.set_exception(EngineLost(self.name))
        if self.listener is not None:
            self.listener.left(self.name, reason)
        for stream in streams:
            stream.fail(EngineLost(self.name))

    def commanded(self, result: CacheResult) -> None:
        if (done := self._commands.get(result.number)) is not None and not done.done():
            done.set_result(result)

    def beat(self, heartbeat: Heartbeat) -> None:
        self.stalls.beat(heartbeat)
        self._progress.beat(heartbeat)

    async def _end_of(self, link: "_EngineLink") -> None:
        """The connection to an engine that hangs is dropped, so that its requests move."""
        while not (await asyncio.wait([link.closed], timeout=self.timings.stalls.check_s))[0]:
            now_s = time.monotonic()
            if why := self._stalled(now_s):
                self._suspect = why
                link.drop(why)
                if self.on_stall is not None:
                    self.on_stall(self.name)
            elif link.canary and now_s > link.canary_until_s:
                link.drop(f"{self._suspect}; its canary request did not end in {self.timings.canary_s:.0f} s")

    def _stalled(self, now_s: float) -> str:
        if self.info is not None and self.info.heartbeat_s:
            why = self.stalls.check(self.load.computed_tokens, now_s)
            if not why and self._streams:
                why = self._progress.problem(self.info, self.load, self.listener is not None, now_s)
            return why
        busy, hung_s = self._streams and self.load.running, self.timings.hung_s
        is_hung = busy and now_s - self._progress.last_s > hung_s
        return f"it has work but took no step in {hung_s:.0f} s" if is_hung else ""

    async def _stay_connected(self) -> None:
        delays = self.timings.reconnect_delays()
        await asyncio.sleep(self._exclusion.left_s)
        while True:
            link = _EngineLink(self)
            try:
                async with asyncio.timeout(self.timings.dial_s):
                    await dial(link, self.endpoint.split(), self.endpoint.tls_host, self._tls)
                await asyncio.wait(
                    [link.welcomed, link.closed], timeout=self.timings.welcome_s, return_when="FIRST_COMPLETED"
                )
                if not link.welcomed.done():
                    link.drop(f"no welcome within {self.timings.welcome_s:.0f} s")
                await self._end_of(link)
                if link.trusted:
                    delays = self.timings.reconnect_delays()
            except OSError as error:  # TimeoutError is one, too
                self.problem = error.strerror or str(error) or f"no connection within {self.timings.dial_s:.0f} s"
            finally:
                if link is not self._link:  # this task was cancelled half-way
                    link.drop("closed")
            await asyncio.sleep(max(next(delays), self._exclusion.left_s))


class _EngineLink(Link):
    """Sends Hello, receives Welcome or Refused, then steps."""

    def __init__(self, client: EngineClient) -> None:
        super().__init__(f"engine {client.name}")
        self._client = client
        self.trusted = False  # requests may use it
        self.distrusted = False  # nothing that it says counts any more
        self._check: StepCheck | None = None  # since the Welcome
        self.has_vocabulary = False  # it was sent on this connection
        self.canary = ""  # id of the canary request while it runs
        self.canary_until_s = 0.0
        self.welcomed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._welcome: Welcome | None = None  # for when the canary request has ended

    def on_open(self) -> None:
        self.send(Hello(self._client.endpoint.token, self._client.version, heartbeats=True))

    def send_canary(self, welcome: Welcome) -> None:
        """A tiny request, at once and before all others."""
        self._welcome = welcome
        self.canary = f"canary-{secrets.token_hex(8)}"
        self.canary_until_s = time.monotonic() + self._client.timings.canary_s
        prompt_ids = pack([token_id % welcome.info.vocab_size for token_id in range(1, 1 + _CANARY_TOKENS)])
        task = welcome.info.task
        canary = EngineRequest(
            id=self.canary,
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_tokens=1),
            priority=Priority.PRIORITY,
            encode=EncodeParams(lens=pack([_CANARY_TOKENS])) if task in ("embed", "rerank", "classify") else None,
            transcribe=TranscribeParams(audio=b"", max_audio_ms=0) if task == "transcribe" else None,
            predict=PredictParams(input=b"") if welcome.info.predicts else None,
        )
        self.send(Submit([canary]))

    def _await_canary(self, step: Step) -> None:
        for delta in step.deltas:
            if delta.id == self.canary and delta.finish is not None:
                self.canary = ""
                if delta.finish in ("stop", "length"):
                    assert self._welcome is not None
                    self._client.trusted(self, self._welcome)
                else:
                    self.drop(f"its canary request failed: {delta.error.message if delta.error else delta.finish}")

    def data_received(self, data: bytes) -> None:
        self._client.stalls.received()  # also a part of a large frame
        super().data_received(data)

    def on_frame(self, payload: bytes) -> None:
        if self.distrusted:
            return
        message = decode(from_engine_decoder, payload)
        if type(message) is Step:
            if self._check is None:
                raise FrameError("a step before the welcome")
            if why := self._check.problem(message):
                return self._client.distrust(self, why)
            if self.canary:
                return self._await_canary(message)
            self._client.absorb(message)
        elif isinstance(message, Heartbeat):
            self._client.beat(message)
        elif isinstance(message, CacheResult):
            self._client.commanded(message)
        elif isinstance(message, KVEvents):
            if self._client.listener is not None:
                self._client.listener.kv_events(self._client.name, message)
        elif isinstance(message, Welcome) and self.welcomed.done():
            self._welcome = message
            self._client.changed(self, message)
        elif isinstance(message, Welcome):
            self._check = StepCheck(message.info, message.load)
            if why := implausible(message.load):
                return self._client.distrust(self, why)
            self.welcomed.set_result(None)
            self._client.welcomed(self, message)
        elif isinstance(message, Refused):
            self._client.refused(message.error)
            self.drop(message.error.message)

    def on_close(self, reason: str) -> None:
        self._client.lost(self, reason)
