"""One streamed request as a client sees it: what it was told, and how it ended."""

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
class Told:
    """Of one request, choice by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, list[str]] = field(default_factory=dict)
    usage: list[dict[str, Any]] = field(default_factory=list)
    n_done: int = 0  # times that the stream said it was over
    n_refused: int = 0  # times that it was not taken; nothing had begun
    left: bool = False  # we hung up
    problem: str = ""

    def hear(self, payload: str) -> None:
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


def stream(url: str, path: str, body: dict[str, Any], leave_after: int | None = None) -> Told:
    """Ask until it is taken, then listen to the end, or to so many events."""
    told = Told()
    raw = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SILENCE_S)
        try:
            connection.request("POST", path, raw, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                _listen(answer, told, leave_after)
                return told
            if answer.status not in (429, 503) or not answer.getheader("Retry-After"):
                told.problem = f"{answer.status}: {answer.read()!r}"
                return told
            told.n_refused += 1
        except (OSError, http.client.HTTPException) as error:
            told.problem = f"the connection broke: {error!r}"
            return told
        finally:
            connection.close()
        time.sleep(RETRY_S)
    told.problem = "it was never taken"
    return told


def _listen(answer: http.client.HTTPResponse, told: Told, leave_after: int | None) -> None:
    n = 0
    while line := answer.readline():
        if line.startswith(b"data: "):
            told.hear(line[6:].strip().decode())
            n += 1
            if n == leave_after:
                told.left = True
                return
