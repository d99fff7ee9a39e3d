"""A fake_server server for the commands that talk to one."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "@cf/test/model"


class FakeServer(ThreadingHTTPServer):
    """Streams `pieces` with `pause_s` between them to every chat, and keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon_threads = True
        self.pieces = ["Hel", "lo", "!"]
        self.pause_s = 0.0
        self.error: tuple[int, str] | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = threading.Event()  # a client went away in the middle of an answer
        self.output_tokens = 0

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.server.headers.append(dict(self.headers))
        load = {"running": 1, "waiting": 2, "kv_used_blocks": 1, "kv_total_blocks": 4}
        self.server.output_tokens += 100
        engine = {
            "name": "model-0",
            "model": MODEL,
            "ok": True,
            "problem": "",
            "device": "cpu",
            "backend": "native",
            "kv_tokens": 64,
            "load": {**load, "output_tokens": self.server.output_tokens},
        }
        bodies: dict[str, Any] = {
            "/health": {"status": "ok"},
            "/v1/models": {"data": [{"id": MODEL}]},
            "/api/ps": {"ok": True, "engines": [engine]},
        }
        self._json(200, bodies[self.path])

    def do_POST(self) -> None:
        self.server.headers.append(dict(self.headers))
        self.server.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.error is not None:
            status, message = self.server.error
            return self._json(status, {"error": {"message": message}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for piece in self.server.pieces:
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                time.sleep(self.server.pause_s)
        except OSError:
            self.server.left.set()
            return
        details = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        self._event({"choices": [], "usage": details})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
