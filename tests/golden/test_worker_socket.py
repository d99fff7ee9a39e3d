"""Golden messages on the socket of an engine worker.

The worker is the stand-in engine: the real socket server, step loop, scheduler and prefix cache around scripted tokens.
Frames are encoded and decoded as plain MessagePack, so that this file knows the protocol and none of our types.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.golden import files

Message = dict[str, Any]
PATIENCE_S = 30.0
TOKEN = "join-token"
# Figures of load reports and heartbeats that depend on the machine, or on how requests met in steps.
VOLATILE = frozenset(
    {"prefill_rate", "steps", "computed_tokens", "output_tokens", "utilisation", "jobs_utilisation", "busy_s"}
    | {"step_s", "in_step", "preparing"}
)
DELTA = ("id", "token_ids", "finish", "usage", "logprobs", "error", "waited_s", "values")


class Connection:
    """A client of the worker that keeps what both sides say."""

    def __init__(self, path: Path, hello: Message | None = None) -> None:
        self.said: list[Any] = []
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(PATIENCE_S)
        self._sock.connect(str(path))
        self._buffer = b""
        self._kv_changes = {"stored": b"", "removed": b""}  # since the snapshot
        if hello is not None:
            self.send({"type": "hello", "token": TOKEN, "version": 6, **hello})
            self.note(self.receive())

    def send(self, message: Message) -> None:
        self.said.append({"sent": readable(message)})
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, payload: bytes) -> None:
        self._sock.sendall(struct.pack("<I", len(payload)) + payload)

    def receive(self) -> Message | None:
        """The next message; None if the worker has closed the connection."""
        while len(self._buffer) < 4 or len(self._buffer) < 4 + (length := struct.unpack("<I", self._buffer[:4])[0]):
            try:
                data = self._sock.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._buffer += data
        payload, self._buffer = self._buffer[4 : 4 + length], self._buffer[4 + length :]
        message: Message = msgspec.msgpack.decode(payload)
        if message["type"] == "kv_events" and not message.get("whole"):
            for name in self._kv_changes:
                self._kv_changes[name] += message.get(name, b"")
        return message

    def note(self, message: Message | None) -> None:
        self.said.append({"received": "end of connection" if message is None else readable(message)})

    def note_next(self, kind: str) -> Message | None:
        """Note the next message of a kind, or the end of the connection, whatever comes before it."""
        while (message := self.receive()) is not None and message["type"] != kind:
            pass
        self.note(message)
        return message

    def note_replies(self, *ids: str, then_abort: bool = False) -> None:
        """Note all deltas of some requests as one for each; abort them after the first delta."""
        replies: dict[str, Message] = {}
        while any("finish" not in replies.get(name, {}) for name in ids):
            message = self.receive()
            assert message is not None
            for values in message.get("deltas", ()):
                delta = dict(zip(DELTA, values, strict=False))
                add_delta(replies.setdefault(delta["id"], {}), delta)
            if then_abort and replies:
                then_abort = False
                self.send({"type": "abort", "ids": list(ids)})
        for reply in replies.values():
            if reply["finish"] == "cancelled":  # how far it came depends on when the worker reads the abort
                del reply["token_ids"], reply["usages"]
        self.said.append({"received": {"type": "deltas", **{name: readable(replies[name]) for name in ids}}})

    def close(self) -> list[Any]:
        """What was said, and all changes of the prefix cache that the client has heard of."""
        self._sock.close()
        if any(self._kv_changes.values()):
            self.said.append({"received": readable({"type": "kv_events", **self._kv_changes})})
        return self.said


def add_delta(reply: Message, delta: Message) -> None:
    """Add a delta of one step to what a request has had so far."""
    reply["token_ids"] = reply.get("token_ids", b"") + delta.get("token_ids", b"")
    if delta.get("usage") is not None:
        reply.setdefault("usages", []).append(delta["usage"])
    if delta.get("logprobs"):
        reply["logprobs"] = reply.get("logprobs", []) + delta["logprobs"]
    for name in ("finish", "error"):
        if delta.get(name) is not None:
            reply[name] = delta[name]


def readable(value: Any, name: str = "") -> Any:
    """Plain JSON: token ids as numbers, keys and other bytes as hexadecimal digits, volatile figures as their names."""
    if isinstance(value, dict):
        return {str(key): readable(item, str(key)) for key, item in value.items() if key not in VOLATILE}
    if isinstance(value, list | tuple):
        return [readable(item, name) for item in value]
    if isinstance(value, bytes):
        return list(array("I", value)) if name.endswith("_ids") else value.hex()
    return value


def request(name: str, prompt: list[int], session: str = "standin:say=count", **more: Any) -> Message:
    sampling = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True, **more.pop("sampling", {})}
    return {"id": name, "prompt_ids": array("I", prompt).tobytes(), "sampling": sampling, "session": session, **more}


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "worker.sock"
    flags = ["--socket", str(path), "--name", "tiny", "--context-len", "256", "--vocab-size", "100"]
    flags += ["--kv-tokens", "1024", "--check-kv"]
    process = subprocess.Popen(
        [sys.executable, "-m", "standins.standin_engine", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "EMBERLINE_WORKER_TOKEN": TOKEN},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    yield path
    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)
    process.stdout.close()


def test_what_a_worker_says(worker: Path) -> None:
    scenes = {scene.__name__: scene(worker) for scene in SCENES}
    files.check(files.FOLDER / "worker_socket.json", scenes)


def wrong_token(path: Path) -> list[Any]:
    return Connection(path, {"token": "wrong"}).close()


def unknown_version(path: Path) -> list[Any]:
    return Connection(path, {"version": 1}).close()


def no_hello(path: Path) -> list[Any]:
    connection = Connection(path)
    connection.send({"type": "abort", "ids": []})
    connection.note(connection.receive())
    return connection.close()


def unreadable_frame(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send_bytes(b"\xc1")
    connection.note_next("nothing")
    return connection.close()


def generation(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send({"type": "submit", "requests": [request("a", [5, 6, 7])]})
    connection.note_replies("a")
    stopping = request("b", [5, 6], "standin:say=9.8.2", sampling={"ignore_eos": False, "max_tokens": None})
    connection.send({"type": "submit", "requests": [stopping, request("c", [8], sampling={"logprobs": 1})]})
    connection.note_replies("b", "c")
    return connection.close()


def prefix_cache(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send({"type": "watch_kv"})
    connection.note_next("kv_events")
    for name, salt in (("first", b""), ("again", b""), ("salted", b"x" * 16)):
        connection.send({"type": "submit", "requests": [request(name, list(range(5, 45)), salt=salt)]})
        connection.note_replies(name)
    connection.send({"type": "cache", "number": 1, "action": "purge", "salt": b"x" * 16})
    connection.note_next("cache_result")
    connection.send({"type": "submit", "requests": [request("last", [5])]})
    connection.note_replies("last")  # events of the purge have come by then
    connection.send({"type": "cache", "number": 2, "action": "export", "path": "/nonexistent/file"})
    connection.note_next("cache_result")
    return connection.close()


def refusals(path: Path) -> list[Any]:
    connection = Connection(path, {})
    wrong = {
        "empty": request("empty", []),
        "long": request("long", [5] * 300),
        "vocabulary": request("vocabulary", [5, 5000]),
        "grammar": request("grammar", [5], grammar=b"\x80"),
        "overloaded": request("overloaded", [5], "standin:refuse=true"),
        "transfer": request("transfer", [5], awaits="nothing"),
        "resumed": request("resumed", [5], output_ids=b"\x05\x00\x00\x00", sampling={"max_tokens": 1}),
    }
    for name, wanted in wrong.items():
        connection.send({"type": "submit", "requests": [wanted]})
        connection.note_replies(name)
    return connection.close()


def failure(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send({"type": "submit", "requests": [request("nan", [5], "standin:say=count,error_after=2")]})
    connection.note_replies("nan")
    connection.send(
        {"type": "submit", "requests": [request("late", [5], "standin:say=count,itl_ms=50", deadline_s=0.0)]}
    )
    connection.note_replies("late")
    return connection.close()


def abort(path: Path) -> list[Any]:
    connection = Connection(path, {})
    slow = request("slow", [5], "standin:say=9.9.9,itl_ms=200", sampling={"max_tokens": 200})
    connection.send({"type": "submit", "requests": [slow]})
    connection.note_replies("slow", then_abort=True)
    return connection.close()


def heartbeats_and_load(path: Path) -> list[Any]:
    """The load of an idle worker, and that a client that asks for heartbeats gets them."""
    connection = Connection(path, {"heartbeats": True})
    connection.note_next("heartbeat")
    return connection.close()


def role(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send({"type": "set_role", "role": "prefill"})
    connection.note_next("welcome")
    return connection.close()


def drain(path: Path) -> list[Any]:
    connection = Connection(path, {})
    connection.send({"type": "drain", "limit_s": 5.0})
    connection.note_next("nothing")
    return connection.close()


SCENES = (
    *(wrong_token, unknown_version, no_hello, unreadable_frame, generation, prefix_cache, refusals, failure, abort),
    *(heartbeats_and_load, role, drain),
)
