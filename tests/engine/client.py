"""A blocking client of an engine, engine processes to connect to, and an engine in the test's own process."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager

from emberline.protocol import frames
from emberline.protocol.frames import Abort, FrameBuffer, Heartbeat, Hello, KVEvents, Step, Submit
from emberline.protocol.token_ids import unpack


class Answers:
    """The deltas of each request, from `step`, which a subclass implements."""

    def __init__(self):
        self.deltas = {}

    def take_deltas(self, deltas):
        for delta in deltas:
            self.deltas.setdefault(delta.id, []).append(delta)

    def finish(self, *ids):
        """Step until these requests have ended. Returns the last delta of the last one."""
        while any(id not in self.deltas or self.deltas[id][-1].finish is None for id in ids):
            self.step()
        return self.deltas[ids[-1]][-1]

    def tokens(self, id):
        return [token for delta in self.deltas[id] for token in unpack(delta.token_ids)]


class LocalEngine(Answers):
    """The step loop that a CPU worker with these flags runs, without its process: the second import of torch that a
    process costs takes longer than most tests."""

    def __init__(self, model, *flags):
        from emberline.engine.worker import main as worker

        super().__init__()
        common = ("--model", model, "--socket", "unused", "--device", "cpu", "--threads", 1)
        self.loop = worker.build(worker.parse_arguments([str(each) for each in (*common, *flags)]))[0]

    def set_vocabulary(self, vocabulary):
        self.loop.set_vocabulary(vocabulary)

    def submit(self, *requests):
        for each in requests:
            self.loop.submit(each, 0.0)

    def step(self):
        self.take_deltas(self.loop.step(0.0))


class Client(Answers):
    def __init__(self, address, token="secret", greet=True, version=frames.VERSION):
        scheme, _, rest = address.partition(":")
        if scheme == "unix":
            self.sock = socket.socket(socket.AF_UNIX)
            self.sock.connect(rest)
        else:
            host, _, port = rest.rpartition(":")
            self.sock = socket.create_connection((host, int(port)))
        super().__init__()
        self.sock.settimeout(300)  # a decode engine waits a minute for an offer
        self._buffer = FrameBuffer()
        self._messages = []
        self.steps = []
        if greet:
            self.send(Hello(token, version))
            self.greeting = self.receive()

    def send(self, message):
        self.sock.sendall(frames.encode(message))

    def set_vocabulary(self, vocabulary):
        self.send(vocabulary)

    def submit(self, *requests):
        self.send(Submit(list(requests)))

    def abort(self, *ids):
        self.send(Abort(list(ids)))

    def receive(self):
        """The next message; ConnectionError when the engine closed the connection."""
        while not self._messages:
            data = self.sock.recv(1 << 20)
            if not data:
                raise ConnectionError("closed")
            self._messages += map(frames.from_engine_decoder.decode, self._buffer.feed(data))
        return self._messages.pop(0)

    def fileno(self):
        return self.sock.fileno()

    @property
    def has_messages(self):
        """True if `receive` returns without reading from the socket."""
        return bool(self._messages)

    def step(self):
        while isinstance(message := self.receive(), Heartbeat | KVEvents):
            pass
        return self.take(message)

    def take(self, message):
        assert isinstance(message, Step)
        self.steps.append(message)
        self.take_deltas(message.deltas)
        return message

    def close(self):
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def start(module, *args, token="secret"):
    """The process, and what its ready line says. Its log is a file: a pipe that nobody reads fills up."""
    env = {**os.environ, "EMBERLINE_WORKER_TOKEN": token, "EMBERLINE_LOG_FORMAT": "json"}
    command = [sys.executable, "-m", module, *map(str, args)]
    with tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
        process.stderr = open(log.name)  # noqa: SIM115
    line = process.stdout.readline()
    return process, json.loads(line or "{}")


@contextmanager
def engine(module, *args, token="secret"):
    """A running engine process: (process, address)."""
    process, ready = start(module, *args, token=token)
    try:
        assert ready.get("ready"), process.communicate()[1]
        yield process, ready["address"]
    finally:
        process.kill()
        process.communicate()


def wait_until(true, limit_s=60.0):
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
