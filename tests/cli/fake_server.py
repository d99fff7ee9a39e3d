"""A fake Emberline server for the commands that talk to one: canned status, scripted chats, one batch."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "@cf/test/model"
RESULTS = b'{"custom_id":"c0"}\n{"custom_id":"c1"}\n'
QUEUE = {
    "waiting": [{"model": "@cf/x/m", "account": "a", "queued": 5, "running": 2, "quarantined": 1, "age_s": 75.0}],
    "n_dead": 1,
    "dead": [{"batch": "batch_1", "line": 4, "custom_id": "c4\x1b[2J", "model": "@cf/x/m"}],
}


CACHE = {
    "name": "model-0",
    "model": "model",
    "device": {"used_blocks": 3, "total_blocks": 100},
    "tiers": [{"name": "disk", "blocks": 7, "hits": 1, "misses": 1, "state": "degraded: the disk is full"}],
}


class FakeServer(ThreadingHTTPServer):
    """Streams `deltas` with `pause_s` between them to every chat. Its batch advances by two requests at each poll.

    `answers` come before all others: the body for each path, whatever the method and the query."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.deltas = ["Hel", "lo", "!"]
        self.pause_s = 0.0
        self.error: tuple[int, str] | None = None  # the answer to every POST
        self.chats: list[dict[str, Any]] = []
        self.posts: list[tuple[str, str, bytes]] = []  # (path, content type, body)
        self.deleted: list[str] = []  # paths
        self.headers: list[dict[str, str]] = []
        self.disconnected = threading.Event()  # a client went away in the middle of an answer
        self.output_tokens = 0
        self.tiers: list[dict[str, Any]] = []
        self.drafts: list[list[Any]] = []
        self.model_states: list[dict[str, Any]] = []
        self.comments: list[str] = []  # in streams, before the first event
        self.n_done = 0  # of the batch
        self.status: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}

    @property
    def port(self) -> str:
        return str(self.server_address[1])

    def ps(self) -> dict[str, Any]:
        self.output_tokens += 100
        load = {"running": 1, "waiting": 2, "kv_used_blocks": 1, "kv_total_blocks": 4}
        engine = {
            "name": "model-0",
            "model": MODEL,
            "ok": True,
            "problem": "",
            "state": "ready",
            "in_flight": 0,
            "device": "cpu",
            "backend": "native",
            "kv_tokens": 64,
            "load": {**load, "output_tokens": self.output_tokens, "tiers": self.tiers, "drafts": self.drafts},
        }
        return {"ok": True, "engines": [engine], "model_states": self.model_states}

    def batch(self) -> dict[str, Any]:
        self.n_done = min(6, self.n_done + 2)
        ended = self.n_done == 6
        return {
            "id": "batch_1",
            "status": "completed" if ended else "in_progress",
            "request_counts": {"total": 6, "completed": max(0, self.n_done - 1), "failed": 1},
            "created_at": 1,
            "output_file_id": "file-out" if ended else None,
            "error_file_id": None,
            "queue": {"position": 3, "estimated_wait_s": 200.0},
        }


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        if self._answered():
            return None
        bodies: dict[str, Any] = {
            "/health": lambda: {"status": "ok"},
            "/v1/models": lambda: {"data": [{"id": MODEL, "aliases": ["model", "Short"]}, {"id": "@cf/test/other"}]},
            "/api/ps": self.server.ps,
            "/api/queue": lambda: QUEUE,
            "/api/status": lambda: self.server.status,
            "/v1/batches/batch_1": self.server.batch,
            "/v1/batches?limit=20": lambda: {"data": [self.server.batch()], "has_more": False},
            "/v1/files/file-out/content": lambda: RESULTS,
            "/api/cache": lambda: {"workers": [CACHE]},
            "/api/cache/export?session=s": lambda: b"exported",
        }
        if self.server.error is not None and self.path.startswith("/api/cache"):
            status, message = self.server.error
            return self._reply(status, {"error": {"message": message}})
        path = self.path if self.path in bodies else self.path.partition("?")[0]
        self._reply(200, bodies[path]())

    def do_POST(self) -> None:
        self.server.headers.append(dict(self.headers))
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, self.headers["Content-Type"], raw))
        if self.path == "/v1/chat/completions":
            self.server.chats.append(json.loads(raw))
        if self._answered():
            return
        if self.server.error is not None:
            status, message = self.server.error
            self._reply(status, {"error": {"message": message}})
        elif self.path == "/v1/chat/completions":
            self._stream()
        elif self.path == "/v1/files":
            self._reply(200, {"id": "file-in"})
        elif self.path == "/api/queue/replay":
            self._reply(200, {"replayed": 1})
        elif self.path.startswith("/api/models/"):
            self._reply(200, {"model": MODEL, "state": "loaded"})
        elif self.path == "/api/cache/purge":
            self._reply(200, {"blocks": 5, "workers": {}, "conversations": 2, "streams": 1, "replies": 3})
        elif self.path == "/api/cache/import":
            self._reply(200, {"blocks": 4, "worker": "model-0"})
        elif self.path.startswith("/api/workers/"):
            self._reply(200, {"workers": [{"name": "model-0", "state": "draining", "in_flight": 2}]})
        else:
            self._reply(200, self.server.batch())

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        assert self._answered(), self.path

    def _answered(self) -> bool:
        path = self.path.partition("?")[0]
        if path in self.server.answers:
            self._reply(200, self.server.answers[path])
        return path in self.server.answers

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for comment in self.server.comments:
                self.wfile.write(f": {comment}\n\n".encode())
            for text in self.server.deltas:
                self._event({"choices": [{"index": 0, "delta": {"content": text}}]})
                time.sleep(self.server.pause_s)
        except OSError:
            self.server.disconnected.set()
            return
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _reply(self, status: int, body: Any) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
