"""One streamed request as a client sees it: its events and how it ended."""

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

SILENCE_S = 120.0  # nothing for so long: the stream hangs
PATIENCE_S = 120.0  # for a server that has no engine at the moment
RETRY_S = 0.2


@dataclass(slots=True)
class StreamRecord:
    """What a stream contained, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: list[dict[str, Any]] = field(default_factory=list)
    n_done: int = 0  # [DONE] events
    n_refused: int = 0  # refusals before it started
    left: bool = False  # the client disconnected
    problem: str = ""

    def add(self, payload: str) -> None:
        if payload == "[DONE]":
            self.n_done += 1
            return
        event = json.loads(payload)
        if "error" in event:
            self.problem = f"it broke off: {event['error']}"
            return
        if event.get("usage"):
            self.usage.append(event["usage"])
        for choice in event["choices"]:
            index = choice["index"]
            said = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + said
            if choice.get("finish_reason"):
                self.finishes.setdefault(index, []).append(choice["finish_reason"])


def stream(url: str, path: str, body: dict[str, Any], leave_after: int | None = None) -> StreamRecord:
    """Retry until it is accepted, then read to the end, or `leave_after` events."""
    record = StreamRecord()
    raw = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SILENCE_S)
        try:
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                _listen(answer, record, leave_after)
                return record
            if answer.status not in (429, 503) or not answer.getheader("Retry-After"):
                record.problem = f"{answer.status}: {answer.read()!r}"
                return record
            record.n_refused += 1
        except (OSError, http.client.HTTPException) as error:
            record.problem = f"the connection broke: {error!r}"
            return record
        finally:
            connection.close()
        time.sleep(RETRY_S)
    record.problem = "it was never taken"
    return record


def _listen(answer: http.client.HTTPResponse, record: StreamRecord, leave_after: int | None) -> None:
    n = 0
    while line := answer.readline():
        if line.startswith(b"data: "):
            record.add(line[6:].strip().decode())
            n += 1
            if n == leave_after:
                record.left = True
                return
