"""One request as a client sees it: its events and how it ended."""

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SILENCE_S = 120.0  # nothing for so long: the request hangs
PATIENCE_S = 120.0  # for a server that has no engine at the moment
RETRY_S = 0.2


@dataclass(slots=True)
class StreamRecord:
    """What a reply contained, by choice."""

    request_id: str = ""  # once the response began
    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: list[dict[str, Any]] = field(default_factory=list)
    n_done: int = 0  # [DONE] events
    n_refused: int = 0  # refusals before it started
    failed: list[tuple[str, float, float]] = field(default_factory=list)  # tries: id, when it was asked, when it failed
    left: bool = False  # the client disconnected
    broke: bool = False  # the server disconnected
    silence_s: float = 0.0  # the longest
    problem: str = ""

    def add(self, payload: str) -> None:
        if payload == "[DONE]":
            self.n_done += 1
            return
        try:
            event = json.loads(payload)
        except ValueError:
            self.problem = f"not JSON: {payload[:80]!r}"
            return
        if "error" in event:
            self.problem = f"it broke off: {event['error']}"
            return
        if event.get("usage"):
            self.usage.append(event["usage"])
        for choice in event["choices"]:
            index = choice["index"]
            said = choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content")
            self.texts[index] = self.texts.get(index, "") + (said or "")
            if choice.get("finish_reason"):
                self.finishes.setdefault(index, []).append(choice["finish_reason"])


def stream(url: str, path: str, body: dict[str, Any], leave_after: int | None = None) -> StreamRecord:
    """Retry until it is accepted, then read to the end, or `leave_after` events."""
    return send(url, path, {**body, "stream": True, "stream_options": {"include_usage": True}}, leave_after)


def send(
    url: str,
    path: str,
    body: dict[str, Any],
    leave_after: int | None = None,
    leave_after_s: float | None = None,
    headers: dict[str, str] | None = None,
) -> StreamRecord:
    """A request, streamed or not, until it is accepted. `leave_after_s`: disconnect if nothing has come by then."""
    record = StreamRecord()
    raw = json.dumps(body).encode()
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SILENCE_S)
        asked_s = time.monotonic()
        try:
            connection.connect()
            sock = connection.sock  # which the connection forgets where the server closes it after the response
            sock.settimeout(leave_after_s or SILENCE_S)
            connection.request("POST", path, raw, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            request_id = answer.getheader("x-request-id") or ""
            if answer.status == 200:
                record.request_id = request_id
                sock.settimeout(SILENCE_S)
                _read(answer, record, bool(body.get("stream")), leave_after, asked_s)
                return record
            if answer.status not in (429, 503) or not answer.getheader("Retry-After"):
                record.request_id = request_id
                record.problem = f"{answer.status}: {answer.read()!r}"
                return record
            record.n_refused += 1
            record.failed.append((request_id, asked_s, time.monotonic()))
        except TimeoutError:
            record.left = leave_after_s is not None and not record.request_id
            record.problem = "" if record.left else f"nothing for {SILENCE_S} s"
            return record
        except ConnectionRefusedError:
            pass  # the server is being restarted: nothing was sent
        except (OSError, http.client.HTTPException) as error:
            record.broke = True
            record.problem = f"the connection broke: {error!r}"
            return record
        finally:
            connection.close()
        time.sleep(RETRY_S)
    record.problem = "it was never taken"
    return record


def _read(
    answer: http.client.HTTPResponse, record: StreamRecord, streamed: bool, leave_after: int | None, asked_s: float
) -> None:
    if not streamed:
        record.add(answer.read().decode())
        record.n_done += 1
        record.silence_s = time.monotonic() - asked_s
        return
    n, before_s = 0, asked_s
    while line := answer.readline():
        now_s = time.monotonic()
        record.silence_s, before_s = max(record.silence_s, now_s - before_s), now_s
        if line.startswith(b"data: "):
            record.add(line[6:].strip().decode())
            n += 1
            if n == leave_after:
                record.left = True
                return
    if not record.n_done and not record.problem:
        record.broke, record.problem = True, "the stream ended without [DONE]"
