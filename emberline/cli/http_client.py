"""A small HTTP client of an Emberline server, for the commands that talk to one."""

import http.client
import json
import os
import secrets
import time
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from emberline.config import Config
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable

PROBE_S = 2.0  # to find out whether a server is there
_PIECE = 1 << 20
ANSWER_S = 600.0  # between two tokens, at most


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int
    key: str | None = None

    @classmethod
    def of(cls, config: Config) -> "Address":
        """Where a server with this configuration is reached from here."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.server.host, config.server.host)
        return cls(host.strip("[]"), config.server.port, config.auth.key)

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class Timing(msgspec.Struct):
    """What one answer cost. Seconds from sending the request."""

    first_token_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """While decoding: the first token is the prefill's."""
        return (
            (self.output_tokens - 1) / max(self.total_s - self.first_token_s, 1e-9) if self.output_tokens > 1 else 0.0
        )


def is_there(address: Address) -> bool:
    """Whether an Emberline server that can move tokens answers at the address."""
    try:
        health = get(address, "/health", timeout_s=PROBE_S)
    except EmberlineError:
        return False
    return isinstance(health, dict)


def get(address: Address, path: str, timeout_s: float = 10.0) -> Any:
    return _exchange(address, "GET", path, None, _headers(address), timeout_s)


def post(address: Address, path: str, body: dict[str, Any] | None = None, timeout_s: float = 60.0) -> Any:
    return _exchange(address, "POST", path, json.dumps(body or {}).encode(), _headers(address), timeout_s)


def upload(address: Address, path: Path, purpose: str) -> Any:
    """Send a file to /v1/files as it lies on the disk; its size does not matter to our memory."""
    mark = secrets.token_hex(16)
    name = path.name.replace('"', "_").encode("ascii", "replace").decode()
    head = (
        f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
        f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    ).encode()
    tail = f"\r\n--{mark}--\r\n".encode()
    headers = {**_headers(address), "Content-Type": f"multipart/form-data; boundary={mark}"}
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        headers["Content-Length"] = str(len(head) + n_bytes + len(tail))
        body = chain([head], iter(lambda: file.read(_PIECE), b""), [tail])
        return _exchange(address, "POST", "/v1/files", body, headers, ANSWER_S)


def download(address: Address, path: str) -> Iterator[bytes]:
    """What is there, piece by piece."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_S)
    try:
        connection.request("GET", path, headers=_headers(address))
        response = connection.getresponse()
        if response.status != 200:
            _decoded(response, response.read())
        while piece := response.read(_PIECE):
            yield piece
    except (OSError, http.client.HTTPException) as error:
        raise _not_there(address) from error
    finally:
        connection.close()


def _exchange(address: Address, method: str, path: str, body: Any, headers: dict[str, str], timeout_s: float) -> Any:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return _decoded(response, response.read())
    except (OSError, http.client.HTTPException) as error:
        raise _not_there(address) from error
    finally:
        connection.close()


def chat(address: Address, body: dict[str, Any], timing: Timing) -> Generator[str]:
    """The pieces of a streamed answer as they come; `timing` is filled on the way. Closing it stops the work."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_S)
    start_s = time.perf_counter()
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(request).encode(), _headers(address))
        response = connection.getresponse()
        if response.status != 200:
            _decoded(response, response.read())
        for event in _events(response):
            if usage := event.get("usage"):
                timing.prompt_tokens = usage["prompt_tokens"]
                timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
                timing.output_tokens = usage["completion_tokens"]
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    timing.first_token_s = timing.first_token_s or time.perf_counter() - start_s
                    yield text
    except (OSError, http.client.HTTPException) as error:
        raise _not_there(address) from error
    finally:
        timing.total_s = time.perf_counter() - start_s
        connection.close()


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise _error_of(event, 500)
        yield event


def _headers(address: Address) -> dict[str, str]:
    headers = {"Content-Type": "application/json"}
    if address.key:
        headers["Authorization"] = f"Bearer {address.key}"
    return headers


def _decoded(response: http.client.HTTPResponse, raw: bytes) -> Any:
    try:
        body = json.loads(raw) if raw else {}
    except ValueError:
        raise Unavailable("what answers there is not an Emberline server") from None
    if response.status >= 400:
        raise _error_of(body, response.status)
    return body


def _error_of(body: Any, status: int) -> EmberlineError:
    """The error in a body of any dialect, as one of ours."""
    if status == 401:
        return BadInput("the server wants a key: put it into EMBERLINE_AUTH_KEY, or into emberline.toml as [auth] key")
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    kind = BadInput if 400 <= status < 500 else Unavailable
    return kind(str(message or f"the server answered with status {status}"))


def _not_there(address: Address) -> Unavailable:
    return Unavailable(f"no Emberline server answers at {address.url}: start one with `emberline serve`")
