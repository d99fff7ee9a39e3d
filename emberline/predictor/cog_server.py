"""Cog's own server (coglet) in a sandbox: started, watched, and spoken to over a Unix socket."""

import contextlib
import http.client
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import httptools
import msgspec

from emberline.predictor.output_log import HIDDEN, OutputLog, spellings
from emberline.protocol.errors import (
    BadInput,
    Cancelled,
    DeadlineExceeded,
    EmberlineError,
    Overloaded,
    PredictionFailed,
    TooLarge,
    Unavailable,
)
from emberline.protocol.prediction import MAX_LOG_CHARS, MAX_OUTPUT_BYTES, Manifest, Prediction, check_output
from emberline.supervisor.sandbox import containers
from emberline.supervisor.sandbox.containers import RunningContainer
from emberline.supervisor.sandbox.program import SCRATCH, Program, RunningProgram, Sandbox

PORT, PROXY_PORT = 5000, 3128  # inside the sandbox's own network
POLL_S = 0.02  # between two looks at a server that starts
EXPLAIN_S = 0.5  # for a server to end, whose end would explain a lost connection
GRACE_S = 5.0  # for the server to end, when asked
CONTROL_S = 10.0  # for an answer to anything but a prediction
RECV_BYTES = 256 << 10
MAX_FRAMING_BYTES = 64 << 10  # of a response's head, or of its chunks' extensions or its trailers between two pieces
SOURCE = "/src"  # where the predictor sees its project, as in Cog's containers
STORE = "/store"
RELAY = "/relay.py"
PROXY = "/proxy"
_RELAY = Path(__file__).with_name("relay.py")

# Variables that an image sets itself.
_OF_FOLDERS = ("PATH", "COG_PREDICT_TYPE_STUB", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")

_PREFIX = "Prediction failed: "  # that Cog's server puts before the predictor's own message
_CRASHED = "Worker crashed"  # its message when the process is gone

Health = Literal["STARTING", "READY", "BUSY", "SETUP_FAILED", "DEFUNCT", "UNHEALTHY", "UNKNOWN"]


class _Health(msgspec.Struct):
    status: str = "UNKNOWN"
    setup: Any = None
    user_healthcheck_error: str | None = None


class _Reply(msgspec.Struct):
    status: str = ""
    output: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    logs: str | None = ""
    metrics: dict[str, Any] | None = None


class _Detail(msgspec.Struct):
    detail: Any = None
    error: Any = None


class PredictorCrashed(PredictionFailed):
    """The predictor's process ended while it computed a prediction."""


_reply_decoder = msgspec.json.Decoder(_Reply)
_health_decoder = msgspec.json.Decoder(_Health)
_event_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


_POST = (
    b"POST /predictions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Accept: %s\r\nContent-Length: %d\r\n\r\n"
)


class _Connection(http.client.HTTPConnection):
    """HTTP to the server in its sandbox, over a TCP socket that the relay opens there and sends over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        with socket.socket(socket.AF_UNIX) as relay:
            relay.settimeout(CONTROL_S)
            relay.connect(self._path)
            _, descriptors, _, _ = socket.recv_fds(relay, 1, 1)
        if not descriptors:
            raise ConnectionRefusedError("the predictor's server does not listen yet")
        self.sock = socket.socket(fileno=descriptors[0])
        if (self.sock.family, self.sock.type) != (socket.AF_INET, socket.SOCK_STREAM):  # the predictor can be the relay
            self.close()
            raise ConnectionRefusedError("the predictor's relay sent something else than a connection")
        self.sock.settimeout(self.timeout)

    def post(self, body: bytes, accept: bytes) -> None:
        """Ask for a prediction. Sends head and body in one piece: the server wakes up once."""
        if self.sock is None:
            self.connect()
        self.sock.sendall(_POST % (accept, len(body)) + body)


class _Response:
    """A response, read from a socket as it comes. `http.client` takes longer for the head than the server for all."""

    def __init__(self, sock: socket.socket, end_s: float) -> None:
        """Read the head. `end_s` is the monotonic time until which all must have come, else a TimeoutError is raised.

        Raises ConnectionError if the server sends anything but HTTP, a head without end, or closes the connection
        before the end."""
        self._sock = sock
        self._end_s = end_s
        self._parser = httptools.HttpResponseParser(self)
        self._is_complete = False
        self._pieces: list[bytes] = []
        self._framing_bytes = 0  # since the last piece of the body: the parser keeps a header until it is complete
        self.status = 0
        self.keeps_alive = False
        while self.status < 200:  # those below announce another
            self._receive()

    def body(self) -> Iterator[bytes]:
        """The pieces of the body. Raises TooLarge if they have more bytes than an output may have."""
        n_bytes = 0
        while True:
            pieces, self._pieces = self._pieces, []
            n_bytes += sum(map(len, pieces))
            if n_bytes > MAX_OUTPUT_BYTES:
                raise TooLarge(f"the predictor's output has more than {MAX_OUTPUT_BYTES >> 20} MiB")
            yield from pieces
            if self._is_complete:
                return
            self._receive()

    def _receive(self) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        data = self._sock.recv(RECV_BYTES)
        if not data:
            raise ConnectionResetError("the predictor's server closed the connection")
        self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionError(f"the predictor's server sent no HTTP: {error}") from None
        if self._framing_bytes > MAX_FRAMING_BYTES:
            raise ConnectionError("the predictor's server sent a head without end")

    # --- called by the parser ----------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.keeps_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._framing_bytes = 0

    def on_message_complete(self) -> None:
        self._is_complete = self.status >= 200


class CogServer:
    """One server process with its predictor. Threads may share it once it is ready; all methods block."""

    def __init__(
        self,
        manifest: Manifest,
        folder: Path,
        sandbox: Sandbox,
        secrets: dict[str, str],
        log: Path,
        proxy: str = "",
    ) -> None:
        """Start the server of the version in `folder`. `secrets` are variables for it. It ends with this thread.

        `proxy`: the Unix socket of a proxy, by which `setup` may fetch files, which it writes to its project and
        store. Empty: the predictor is offline, and both are read-only."""
        self._manifest = manifest
        self._secrets = spellings(secrets.values())
        self._runtime = tempfile.mkdtemp(prefix="emberline-predictor-")
        # Paths of this machine, which callers do not learn, and what the predictor calls them.
        self._places = ((str(folder / "src"), SOURCE), (str(folder), ""), (self._runtime, ""))
        self._address = f"{self._runtime}/socket"
        self.log = OutputLog(log, tuple(secrets.values()))
        self._local = threading.local()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(self._address)
            listener.listen(128)
            self._program: RunningProgram | RunningContainer
            if manifest.image:
                engine, program = containers.find_engine(manifest.engine), container_program(manifest, secrets)
                files = _RELAY, Path(self._runtime), listener.fileno()
                self._program = RunningContainer(engine, manifest.image, program, *files, self.log.descriptor)
                return
            has_network = bool(sandbox.protections.bubblewrap)  # of its own: else ports are those of the machine
            ports = (PORT, PROXY_PORT) if has_network else (_free_port(), _free_port())
            program = server_program(manifest, folder, secrets, listener.fileno(), ports, proxy)
            self._program = sandbox.start(program, self.log.descriptor, (listener.fileno(),))
        finally:
            listener.close()
            self.log.close_writer()

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def processors(self) -> set[int]:
        """Processors that the predictor runs on. Empty if it may run on all."""
        return self._program.processors

    @property
    def memory_bytes(self) -> int:
        return self._program.memory_bytes

    @property
    def scratch_is_full(self) -> bool:
        """True if the predictor has no scratch space left."""
        return self._program.scratch_is_full

    @property
    def is_alive(self) -> bool:
        return self._program.status is None

    def wait_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait for `setup` to end. Raises Unavailable, which says what went wrong; then `kill` the server."""
        end_s = time.monotonic() + self._manifest.resources.setup_s
        while True:
            health = self.health()
            if health in ("READY", "BUSY"):
                return
            if health == "UNHEALTHY":
                raise Unavailable("the predictor's health check fails; its log says why")
            if health == "SETUP_FAILED" or self._program.status is not None:
                raise Unavailable(f"the predictor's setup failed: {self._problem()}")
            if health == "DEFUNCT":
                raise Unavailable(f"the predictor crashed in its setup: {self._problem()}")
            if should_stop():
                raise Unavailable("the predictor was stopped during its setup")
            if time.monotonic() > end_s:
                limit_s = self._manifest.resources.setup_s
                raise Unavailable(f"the predictor's setup did not end within {limit_s:g} s")
            time.sleep(POLL_S)

    def health(self) -> str:
        """The state of the predictor. STARTING also while the server does not listen yet."""
        if self._program.status is not None:
            return "DEFUNCT"
        try:
            status, body = self._call("GET", "/health-check")
            return _health_decoder.decode(body).status if status == 200 else "UNKNOWN"
        except (OSError, http.client.HTTPException, msgspec.MsgspecError):
            return "STARTING"

    def check(self) -> Prediction:
        """The predictor's health, as a result. Raises PredictionFailed unless it makes predictions."""
        if (health := self.health()) not in ("READY", "BUSY"):
            raise PredictionFailed(f"the predictor is {health}")
        return Prediction(output=msgspec.Raw(msgspec.json.encode(health)))

    def predict(
        self,
        name: str,
        given: bytes,
        limit_s: float,
        on_output: Callable[[bytes], None] | None,
        context: bytes = b"",
    ) -> Prediction:
        """Compute a prediction. `on_output` gets each output as it comes, where the predictor streams. `context`: a
        JSON object for its scope.

        Raises an EmberlineError: BadInput for what the predictor's schema refuses, PredictorCrashed if its process is
        gone, Cancelled, DeadlineExceeded, and PredictionFailed with the predictor's own error message."""
        body = b'{"id":"%s","input":%s,"context":%s}' % (name.encode(), given, context or b"{}")
        connection, end_s = self._connection(limit_s), time.monotonic() + limit_s
        try:
            connection.post(body, b"application/json" if on_output is None else b"text/event-stream")
            response = _Response(connection.sock, end_s)
            if on_output is not None and response.status == 200:
                finished = self._finished(self._stream(response, on_output))
                self._drop_connection()  # the rest of the stream is not read
                return finished
            raw = b"".join(response.body())
            if not response.keeps_alive:
                self._drop_connection()
            if response.status != 200:
                raise self._refusal(response.status, raw)
            return self._finished(_reply_decoder.decode(raw))
        except OSError as error:
            self._drop_connection()
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"the prediction did not end within {limit_s:g} s") from None
            self._program.wait(EXPLAIN_S)
            if self.health() in ("READY", "BUSY"):
                raise PredictionFailed("the predictor's server closed the connection") from None
            raise PredictorCrashed(f"the predictor crashed: {self._problem()}") from None
        except (msgspec.MsgspecError, RecursionError) as error:  # the latter: lists in lists in lists
            self._drop_connection()
            raise PredictionFailed(f"the predictor's server sent what is no prediction: {error}") from None
        except EmberlineError:
            self._drop_connection()
            raise

    def cancel(self, name: str) -> bool:
        """Cancel a prediction. Returns True if it still runs, which it may for a while."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _ = self._call("POST", f"/predictions/{name}/cancel")
            return status == 200
        return False

    def kill(self) -> None:
        """End the server and everything that it has started. Idempotent."""
        self._program.kill()
        self.log.close(1.0)
        with contextlib.suppress(OSError):
            shutil.rmtree(self._runtime)

    def stop(self) -> None:
        """Ask the server to end, then kill it."""
        self._program.terminate()
        self._program.wait(GRACE_S)
        self.kill()

    # --- replies -----------------------------------------------------------------------------------------------------

    def _stream(self, response: _Response, on_output: Callable[[bytes], None]) -> _Reply:
        """Read server-sent events to the last one, `completed`."""
        for event, data in _events(_lines(response.body())):
            if event == "output":
                fields = _event_decoder.decode(data)
                output = bytes(fields.get("chunk") or fields.get("output") or b"null")
                check_output(output, self._manifest.output.get("items") or {})
                on_output(output)
            elif event == "completed":
                return _reply_decoder.decode(data)
        raise ConnectionResetError("the stream has no end")

    def _finished(self, reply: _Reply) -> Prediction:
        printed = reply.logs or ""
        logs, warnings = self._hidden(printed), []
        if any(secret in printed for secret in self._secrets):
            warnings.append("the predictor printed a secret that it was granted, which is hidden")
        if len(logs) > MAX_LOG_CHARS:
            limit = f"{MAX_LOG_CHARS >> 10} KiB"
            warnings.append(f"the predictor printed more than {limit} in one prediction, of which the end is kept")
            logs = logs[-MAX_LOG_CHARS:]
        warning = "; ".join(warnings)
        logs = f"{warning}\n{logs}" if warning else logs
        self.log.add(logs)
        if reply.status == "succeeded":
            check_output(bytes(reply.output), self._manifest.output)
            return Prediction(output=reply.output, logs=logs, metrics=reply.metrics or {}, warning=warning)
        if reply.status == "canceled":
            raise Cancelled("the prediction was cancelled")
        message = self._hidden(reply.error or "the predictor gave no reason")[:2000]
        while message.startswith(_PREFIX):
            message = message.removeprefix(_PREFIX)
        if message == _CRASHED or self.health() == "DEFUNCT":
            raise PredictorCrashed(f"the predictor crashed: {self._problem(message)}")
        raise PredictionFailed(f"the predictor failed: {message}")

    def _refusal(self, status: int, raw: bytes) -> EmberlineError:
        try:
            detail = msgspec.json.decode(raw, type=_Detail)
            message = self._hidden(str(detail.detail or detail.error or ""))[:2000]
        except msgspec.MsgspecError:
            message = ""
        if status in (400, 406, 422):
            return BadInput(f"the predictor refuses this input: {message}")
        if status == 409 and self.health() in ("READY", "BUSY"):
            return Overloaded("all of the predictor's slots are taken", retry_after_s=1)
        if status == 413:
            return TooLarge("the input is too large for the predictor's server")
        if status == 409 or self.health() == "DEFUNCT":
            return PredictorCrashed(f"the predictor crashed: {self._problem(message)}")
        return PredictionFailed(f"the predictor's server answered {status}: {message}")

    def _problem(self, message: str = "") -> str:
        return self._hidden(self._program.problem or message or self.log.last_line)

    def _hidden(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        for path, place in self._places:
            text = text.replace(path, place)
        return text

    # --- connections -------------------------------------------------------------------------------------------------

    def _connection(self, timeout_s: float) -> _Connection:
        """The connection of the calling thread, kept between predictions."""
        found: _Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = _Connection(self._address, timeout_s)
        if found.sock is not None:
            found.sock.settimeout(timeout_s)
        found.timeout = timeout_s
        return found

    def _drop_connection(self) -> None:
        if (found := getattr(self._local, "connection", None)) is not None:
            found.close()
            self._local.connection = None

    def _call(self, method: str, path: str) -> tuple[int, bytes]:
        """One exchange on a connection of its own, so that it waits for no prediction."""
        connection = _Connection(self._address, CONTROL_S)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read(MAX_OUTPUT_BYTES)
        finally:
            connection.close()


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a body, without their ends."""
    begun: list[bytes] = []
    for piece in pieces:
        *ends, rest = piece.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun = []
        begun.append(rest)


def _events(lines: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """Server-sent events: name and data."""
    name, data = "", b""
    for line in lines:
        text = line.rstrip(b"\r")
        if not text:
            if data:
                yield name, data
            name, data = "", b""
        elif text.startswith(b"event:"):
            name = text[6:].strip().decode("utf-8", "replace")
        elif text.startswith(b"data:"):
            data += text[5:].strip()


def server_program(
    manifest: Manifest,
    folder: Path,
    secrets: dict[str, str],
    listener: int,
    ports: tuple[int, int] = (PORT, PROXY_PORT),
    proxy: str = "",
) -> Program:
    """Cog's server as a program for a sandbox. Its project, environment and fetched files are read-only, unless it has
    a proxy to fetch them. `ports`: of the server, and of the proxy as the predictor sees it."""
    resources, (port, proxy_port) = manifest.resources, ports
    own = [(str(folder / "src"), SOURCE)]
    if manifest.store:
        own.append((manifest.store, STORE))
    fixed = [(str(_RELAY), RELAY), *((each, each) for each in manifest.folders), *manifest.mounts]
    if proxy:
        fixed.append((proxy, PROXY))
    relayed = (str(port), str(proxy_port if proxy else 0), PROXY)
    server = (manifest.interpreter, "-m", "cog.server.http", "--host", "127.0.0.1")
    return Program(
        command=(manifest.interpreter, "-I", "-S", RELAY, str(listener), *relayed, *server),
        environment={**environment(manifest, port, proxy_port if proxy else 0), **secrets},
        folder=SOURCE,
        readable=fixed if proxy else [*own, *fixed],
        writable=own if proxy else (),
        memory_bytes=resources.memory_bytes,
        scratch_bytes=resources.scratch_bytes,
        cpus=resources.cpus,
        n_processes=resources.n_processes,
        ports=ports if proxy else (port,),
        gpus=_gpus(manifest),
    )


def container_program(manifest: Manifest, secrets: dict[str, str]) -> Program:
    """The server of an image as a program for a container. The image has its files and its environment."""
    resources = manifest.resources
    own = {name: value for name, value in environment(manifest, PORT, 0).items() if name not in _OF_FOLDERS}
    return Program(
        command=("python", "-I", "-S", containers.RELAY, containers.CONTROL, str(PORT), "0", PROXY, *manifest.command),
        environment={**own, **secrets},
        folder=SOURCE,
        readable=(),
        memory_bytes=resources.memory_bytes,
        scratch_bytes=resources.scratch_bytes,
        cpus=resources.cpus,
        n_processes=resources.n_processes,
        gpus=_gpus(manifest),
    )


def _gpus(manifest: Manifest) -> tuple[str, ...]:
    """Numbers of the devices that the predictor may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "") if manifest.gpu else ""
    return tuple(each for each in visible.split(",") if each)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(manifest: Manifest, port: int, proxy_port: int) -> dict[str, str]:
    """Variables of a predictor, without secrets. `proxy_port` 0: it has no network."""
    threads = str(max(1, int(manifest.resources.cpus)))
    fixed = {
        "PATH": f"{Path(manifest.interpreter).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PORT": str(port),
        "COG_PREDICT_TYPE_STUB": manifest.reference,
        "COG_MAX_CONCURRENCY": str(manifest.slots),
        "COG_LOG_LEVEL": "warning",
        "OMP_NUM_THREADS": threads,
        "XDG_CACHE_HOME": f"{STORE}/cache",
        "HF_HOME": f"{STORE}/huggingface",
        "TORCH_HOME": f"{STORE}/torch",
    }
    network = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if proxy_port:
        address = f"http://127.0.0.1:{proxy_port}"
        network = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), address)
        network |= dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost")
    return {**manifest.environment, **fixed, **network}
