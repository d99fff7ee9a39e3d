"""A small HTTP client for the commands that talk to an Emberline server. Blocking, standard library only."""

import contextlib
import http.client
import json
import os
import secrets
import ssl
import time
from collections.abc import Callable, Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.server.address import ServerAddress

PROBE_TIMEOUT_S = 5.0  # of a server whose machine may be busy; where there is none, connections are refused at once
ANSWER_TIMEOUT_S = 600.0  # between two reads
_CHUNK_BYTES = 1 << 20


class ChatTiming(msgspec.Struct):
    """Latency and token counts of one chat completion. Seconds since the request was sent."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decode rate: the first token belongs to the prefill."""
        return (self.output_tokens - 1) / max(self.total_s - self.ttft_s, 1e-9) if self.output_tokens > 1 else 0.0


def is_running(address: ServerAddress, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
    """True if a healthy Emberline server answers at the address."""
    try:
        return isinstance(get(address, "/health", timeout_s=timeout_s), dict)
    except EmberlineError:
        return False


def served_models(address: ServerAddress) -> dict[str, str]:
    """The ids of the server's models by their names, ids and aliases, in lower case; the default model first."""
    rows = get(address, "/v1/models")["data"]
    cards = [row for row in rows if row.get("root", row["id"]) == row["id"]]  # the others are its aliases
    ids = {str(card["id"]).lower(): str(card["id"]) for card in cards}
    return ids | {
        str(alias).lower(): str(card["id"])
        for card in reversed(cards)
        for alias in card.get("aliases", ())
        if str(alias).lower() not in ids
    }


def get(address: ServerAddress, path: str, timeout_s: float = 10.0) -> Any:
    with _request(address, "GET", path, timeout_s=timeout_s) as response:
        return _decode(response)


def post(address: ServerAddress, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = 60.0) -> Any:
    return request_json(address, "POST", path, body or {}, timeout_s)


def request_json(
    address: ServerAddress, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = 60.0
) -> Any:
    raw = None if body is None else json.dumps(body).encode()
    with _request(address, method, path, raw, timeout_s=timeout_s) as response:
        return _decode(response)


def delete(address: ServerAddress, path: str, timeout_s: float = 60.0) -> Any:
    with _request(address, "DELETE", path, timeout_s=timeout_s) as response:
        return _decode(response)


def decode_reply(status: int, raw: bytes) -> Any:
    """The JSON of a reply; raises its error."""
    body = json.loads(raw) if raw else {}
    if status >= 400:
        raise _error_of(body, status)
    return body


def push(address: ServerAddress, archive: bytes, query: str) -> Any:
    """Push the archive of a predictor's project. Returns once its packages are installed."""
    path = f"/api/models/push?{query}"
    with _request(address, "POST", path, archive, {"Content-Type": "application/x-tar"}, None) as response:
        return _decode(response)


def upload(
    address: ServerAddress, path: Path, purpose: str, moved: Callable[[int], None] = lambda n_bytes: None
) -> Any:
    """Send a file to /v1/files, streamed from the disk; `moved` is told of every piece's size."""

    def pieces(file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(_CHUNK_BYTES):
            yield piece
            moved(len(piece))

    boundary = secrets.token_hex(16)
    name = path.name.replace('"', "_").encode("ascii", "replace").decode()
    head = (
        f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    ).encode()
    tail = f"\r\n--{boundary}--\r\n".encode()
    with path.open("rb") as file:
        n_bytes = len(head) + os.fstat(file.fileno()).st_size + len(tail)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(n_bytes)}
        body = chain([head], pieces(file), [tail])
        with _request(address, "POST", "/v1/files", body, headers) as response:
            return _decode(response)


def send_file(address: ServerAddress, path: str, source: Path) -> Any:
    """Send a file as the body of a POST, streamed from the disk."""
    with source.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(n_bytes)}
        pieces = iter(lambda: file.read(_CHUNK_BYTES), b"")
        with _request(address, "POST", path, pieces, headers) as response:
            return _decode(response)


def download(address: ServerAddress, path: str) -> Iterator[bytes]:
    with _request(address, "GET", path) as response:
        while chunk := response.read(_CHUNK_BYTES):
            yield chunk


def chat(
    address: ServerAddress,
    body: dict[str, Any],
    timing: ChatTiming,
    on_comment: Callable[[str], None] = lambda comment: None,
) -> Generator[str]:
    """The text deltas of a streamed chat completion; fills `timing`. Closing the generator cancels the request.

    `on_comment` is told what the server says meanwhile: that it loads the model."""
    start_s = time.perf_counter()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with _request(address, "POST", "/v1/chat/completions", json.dumps(request).encode()) as response:
            for event in _events(response, on_comment):
                if usage := event.get("usage"):
                    timing.prompt_tokens = usage["prompt_tokens"]
                    timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                    timing.output_tokens = usage["completion_tokens"]
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        timing.ttft_s = timing.ttft_s or time.perf_counter() - start_s
                        yield text
    finally:
        timing.total_s = time.perf_counter() - start_s


@contextlib.contextmanager
def _request(
    address: ServerAddress,
    method: str,
    path: str,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout_s: float | None = ANSWER_TIMEOUT_S,
) -> Iterator[http.client.HTTPResponse]:
    """The response of a request that succeeded; raises the server's error otherwise."""
    credential = address.credential
    authorization = {"Authorization": f"Bearer {credential}"} if credential else {}
    is_tls = address.scheme == "https"
    connect = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    connection = connect(address.host, address.port, timeout=timeout_s)
    try:
        headers = {"Content-Type": "application/json", **authorization, **(headers or {})}
        connection.request(method, f"{address.prefix}{path}", body, headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise _error_of(_decode(response), response.status)
        yield response
    except ssl.SSLError as error:
        raise Unavailable(f"{address.url} does not speak TLS that this machine trusts: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        message = f"no Emberline server answers at {address.url}: start one with `emberline serve`"
        raise Unavailable(message) from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse, on_comment: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b":"):
            on_comment(line[1:].strip().decode(errors="replace"))
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _error_of(event, 500)
        yield event


def _decode(response: http.client.HTTPResponse) -> Any:
    raw = response.read()
    try:
        return json.loads(raw) if raw else {}
    except ValueError:
        raise Unavailable("the server at this address is not an Emberline server") from None


def _error_of(body: Any, status: int) -> EmberlineError:
    """An error body of any API as an exception."""
    if status == 401:
        return BadInput(
            "the server wants a key: give it as --api-key, EMBERLINE_KEY, or [client] key of emberline.toml"
        )
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    kind = BadInput if 400 <= status < 500 else Unavailable
    return kind(str(message or f"the server answered with status {status}"))
