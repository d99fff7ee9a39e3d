"""A fake Hugging Face Hub and package index on a local port."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" * 6 + "c0ff"
TOKEN = "hf_standin"


class StandIn(ThreadingHTTPServer):
    """Serves `files` of one hub repository, or `wheels` of an index.

    `cuts` transfers of each large file break off half-way; `stalled` is set when one hangs there instead.
    """

    daemon_threads = True

    def __init__(self, *, files: dict[str, bytes] | None = None, wheels: dict[str, bytes] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files or {}
        self.wheels = wheels or {}
        self.gated = False
        self.cuts = 0
        self.stall = False
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self, name: str) -> list[str]:
        """The Range of every GET of that file."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith(f"/{name}")]


@contextmanager
def standin(**options: dict[str, bytes]) -> Iterator[StandIn]:
    with StandIn(**options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)  # a proxied request names the host as well
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/simple/"):
            links = "".join(f'<a href="/wheels/{name}">{name}</a>' for name in self.server.wheels)
            return self.answer(200, links.encode(), {"Content-Type": "text/html"})
        if path.startswith("/wheels/"):
            return self.content(self.server.wheels[path.removeprefix("/wheels/")], {})
        if self.server.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        if re.fullmatch(r"/api/models/org/tiny(/revision/\w+)?", path):
            return self.answer(200, self.listing(), {"Content-Type": "application/json"})
        name = re.sub(r"^/org/tiny/resolve/\w+/", "", path)
        if name not in self.server.files:
            code = "EntryNotFound" if path.startswith("/org/tiny/") else "RepoNotFound"
            return self.answer(404, b"", {"X-Error-Code": code})
        content = self.server.files[name]
        etag = hashlib.sha256(content).hexdigest()
        return self.content(content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

    def listing(self) -> bytes:
        siblings = [
            {"rfilename": name, "size": len(content), "blobId": "0", "lfs": self.lfs(name, content)}
            for name, content in self.server.files.items()
        ]
        return json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": siblings}).encode()

    @staticmethod
    def lfs(name: str, content: bytes) -> dict[str, object] | None:
        if not name.endswith((".safetensors", ".gguf", ".bin")):
            return None
        return {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100}

    def content(self, content: bytes, headers: dict[str, str]) -> None:
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, 0])[1])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        part = content[start:]
        if self.command == "GET" and len(part) > 4096 and (self.server.cuts or self.server.stall):
            self.head(206 if start else 200, len(part), headers)
            self.wfile.write(b"" if start else part[: len(part) // 2])  # a resumed one gets no further
            self.wfile.flush()
            if self.server.stall:
                self.server.stalled.set()
                self.server.released.wait()
            self.server.cuts = max(0, self.server.cuts - 1)
            self.close_connection = True
            return
        self.answer(206 if start else 200, part, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(length), "Accept-Ranges": "bytes"}).items():
            self.send_header(name, value)
        self.end_headers()
