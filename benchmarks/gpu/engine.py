"""An engine worker process and a client on its socket: measurements are those of the worker's clients."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberline.protocol import frames
from emberline.protocol.events import DraftUsage, TokenLogprobs
from emberline.protocol.frames import Abort, FrameBuffer, Hello, Refused, Step, Submit, Vocabulary, Welcome
from emberline.protocol.request import EngineRequest, SamplingParams, Speculation
from emberline.protocol.token_ids import pack, unpack

PROGRAM = ("-m", "emberline.engine.worker")
WAIT_S = 300.0
TOKEN_VARIABLE = "EMBERLINE_WORKER_TOKEN"
ALL_PREPARED = "nothing is left to prepare"  # in the worker's log


@dataclass
class Reply:
    """One request as its client observes it."""

    sent_s: float
    n_prompt: int
    times_s: list[float] = field(default_factory=list)  # of each token
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # if it was asked for them
    finish: str | None = None
    cached: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)  # cached tokens
    drafts: DraftUsage | None = None  # if it was asked for

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.sent_s


class Client:
    def __init__(self, path: str, token: str = "") -> None:
        """token: the join token of a worker that was given one."""
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(path)
        self._buffer = FrameBuffer()
        self.replies: dict[str, Reply] = {}  # of requests that have not ended
        self._open = 0
        self._serial = 0
        self.load = frames.EngineLoad()
        self._sock.sendall(frames.encode(Hello(token, frames.VERSION)))
        while not self._receive(WAIT_S):
            pass

    def send_vocabulary(self, tokens: list[bytes]) -> None:
        """Before the first request with a grammar."""
        self._sock.sendall(frames.encode(Vocabulary(tokens)))

    def submit(
        self,
        prompts: list[list[int]],
        n_out: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        grammar: bytes = b"",
        logprobs: int | None = None,
    ) -> list[Reply]:
        """Without drafts, which would profit from the repetitions of random weights."""
        requests, replies = [], []
        for prompt in prompts:
            self._serial += 1
            sampling = SamplingParams(
                max_tokens=n_out,
                ignore_eos=True,
                temperature=temperature,
                top_p=top_p,
                seed=self._serial,
                logprobs=logprobs,
            )
            request = EngineRequest(
                id=f"r{self._serial}",
                prompt_ids=pack(prompt),
                sampling=sampling,
                grammar=grammar,
                speculation=Speculation(max_draft_tokens=0),
            )
            requests.append(request)
            replies.append(Reply(0.0, len(prompt)))
            self.replies[request.id] = replies[-1]
        frame = frames.encode(Submit(requests))
        now = time.perf_counter()
        for reply in replies:
            reply.sent_s = now
        self._open += len(replies)
        self._sock.sendall(frame)
        return replies

    def begin(self, request: EngineRequest) -> Reply:
        """Submit any request."""
        reply = self.replies[request.id] = Reply(time.perf_counter(), len(request.prompt_ids) // 4)
        self._open += 1
        self._sock.sendall(frames.encode(Submit([request])))
        return reply

    def run(self, until_s: float | None = None) -> None:
        """Receive until every request has finished, or until `until_s`."""
        while self._open:
            wait_s = WAIT_S if until_s is None else until_s - time.perf_counter()
            if wait_s <= 0:
                return
            self._receive(wait_s)
            if until_s is None and wait_s == 0:
                raise TimeoutError("no message from the engine")

    def generate(
        self, prompts: list[list[int]], n_out: int, temperature: float = 0.0, **more: Any
    ) -> tuple[float, list[Reply]]:
        """more: as of `submit`."""
        begin = time.perf_counter()
        replies = self.submit(prompts, n_out, temperature, **more)
        self.run()
        wrong = [reply.finish for reply in replies if reply.finish != "length"]
        if wrong:
            raise RuntimeError(f"{len(wrong)} requests ended with {wrong[0]}")
        return time.perf_counter() - begin, replies

    def abort_all(self) -> None:
        """Abort all requests, and wait until they have ended."""
        self._sock.sendall(frames.encode(Abort([*self.replies])))
        self.run()

    def _receive(self, wait_s: float) -> bool:
        if not select.select([self._sock], [], [], wait_s)[0]:
            return False
        data = self._sock.recv(1 << 20)
        if not data:
            raise RuntimeError("the engine closed the connection")
        for payload in self._buffer.feed(data):
            self._take(frames.from_engine_decoder.decode(payload))
        return True

    def _take(self, message: frames.FromEngine) -> None:
        now = time.perf_counter()
        if isinstance(message, Refused):
            raise RuntimeError(message.error.message)
        if isinstance(message, Welcome):
            self.info = message.info
            return
        assert isinstance(message, Step)
        self.load = message.load
        for delta in message.deltas:
            reply = self.replies[delta.id]
            ids = unpack(delta.token_ids)
            reply.tokens += ids
            reply.logprobs += delta.logprobs or []
            reply.times_s += [now] * len(ids)
            if delta.usage is not None:
                reply.cached = delta.usage.cached_tokens
                reply.by_tier = delta.usage.cached_by_tier
                reply.drafts = delta.usage.drafts or reply.drafts
            if delta.finish is not None:
                reply.finish = delta.finish if delta.error is None else delta.error.message
                self._open -= 1
                del self.replies[delta.id]

    def close(self) -> None:
        self._sock.close()


@dataclass
class Worker:
    pid: int
    began_s: float
    ready_s: float  # after process start
    facts: dict[str, object]
    client: Client
    log_start: int  # offset of its first line

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def worker(
    model: Path, log: Path, *flags: str, env: dict[str, str] | None = None, program: tuple[str, ...] = PROGRAM
) -> Iterator[Worker]:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/engine.sock"
        command = [sys.executable, *program, "--model", str(model), "--socket", path, *flags]
        began_s = time.perf_counter()
        log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as sink:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, env={**os.environ, **(env or {})})
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline() or "{}")
            if not ready.get("ready"):
                raise RuntimeError(f"the worker did not start: {ready.get('error')}; see {log}")
            client = Client(path, (env or {}).get(TOKEN_VARIABLE, ""))
            yield Worker(process.pid, began_s, time.perf_counter() - began_s, ready, client, log_start)
            client.close()
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def compile_kernels(model: Path, log: Path, *flags: str) -> float:
    """Let a worker compile all kernels, as a host or an image does once; returns the seconds."""
    with worker(model, log, *flags) as engine:
        wait_until_prepared(engine, log)
        engine.client.generate([[7] * 9000], 2)  # kernels that only long prompts use
        return time.perf_counter() - engine.began_s


def wait_until_prepared(engine: Worker, log: Path) -> float:
    """Wait until the worker has captured its CUDA graphs and pinned its host memory, which it does in idle time.

    Returns the seconds since its start.
    """
    while ALL_PREPARED.encode() not in log.read_bytes()[engine.log_start :]:
        if time.perf_counter() - engine.began_s > WAIT_S:
            raise TimeoutError(f"the worker is still preparing in idle time; see {log}")
        time.sleep(0.05)
    return time.perf_counter() - engine.began_s
