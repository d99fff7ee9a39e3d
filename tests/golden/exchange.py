"""A golden exchange: what a case sends, and everything that can be seen of it from outside."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import httpx

from tests.golden.events import merge_deltas, parse_events
from tests.golden.server import ADMIN_KEY, PATIENCE_S, SETTLE_S, Stage

Json = Any
Run = Callable[["Client"], Awaitable[None]]

# Headers whose values follow from the connection, not from the request.
CONNECTION_HEADERS = frozenset({"date", "content-length", "host", "connection", "transfer-encoding", "accept-encoding"})
IN_STEP_S = 0.5  # after which the engine computes its next step, which takes longer
QUIET_PATHS = frozenset({"/health", "/metrics", "/api/ps", "/api/status"})  # the server does not log them
LONGEST_TEXT = 2000  # characters of a recorded text; a longer one is cut


@dataclass(frozen=True)
class Case:
    """One golden file. `limits` are those of the case's account, `key` fields of its API key."""

    name: str  # GROUP/NAME, the path of its file
    run: Run
    limits: Json = None
    key: Json = None

    @property
    def account(self) -> str:
        """Every case has an account of its own, and so a prefix cache, limits, gateways and usage of its own."""
        return self.name.replace("/", "-")


class Client:
    """Sends the requests of one case with its account's key, and records each exchange."""

    def __init__(self, stage: Stage, http: httpx.AsyncClient, case: Case) -> None:
        self.stage = stage
        self.account = case.account
        self.key = ""
        self.last: httpx.Response
        self._http = http
        self._case = case
        self._exchanges: list[Json] = []
        self._request_ids: list[str] = []

    async def open(self) -> None:
        """Create the account's key, and so the account."""
        if self._case.limits:
            made = await self.admin("POST", "/api/accounts", {"id": self.account, **self._case.limits})
            assert made.status_code == 200, made.text
        made = await self.admin(
            "POST", "/api/keys", {"account": self.account, "name": "golden", **(self._case.key or {})}
        )
        assert made.status_code == 200, made.text
        self.key = made.json()["key"]

    async def admin(self, method: str, path: str, body: Json = None) -> httpx.Response:
        """Send a request of the operator that prepares the case and is not recorded."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        return await self._http.request(method, path, json=body, headers=headers)

    async def post(self, path: str, body: Json = None, **options: Any) -> Json:
        return await self.send("POST", path, body, **options)

    async def get(self, path: str, **options: Any) -> Json:
        return await self.send("GET", path, **options)

    async def until(self, path: str, ready: Callable[[Json], bool], body: Json = None) -> Json:
        """Repeat a request until its reply is as wanted, and record that one alone."""
        method, end_s = "GET" if body is None else "POST", time.monotonic() + PATIENCE_S
        while True:
            found = await self.send(method, path, body, record=False)
            if self.last.status_code == 200 and ready(found):
                return await self.send(method, path, body)
            assert time.monotonic() < end_s, found
            await asyncio.sleep(0.02)

    async def send(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        script: str = "",
        say: str = "",
        headers: dict[str, str] | None = None,
        key: str | None = None,
        content: bytes | None = None,
        files: Json = None,
        shown_path: str = "",
        names_only: int = 0,
        record: bool = True,
    ) -> Json:
        """Send a request and record it; its body, or its events if it was streamed.

        `script` is the stand-in engine's for this request, `say` the text that it generates; `key` is another key than
        the account's, or none if empty. `shown_path` is recorded in place of a path that differs between runs; with
        `names_only` only the names of the body's fields are, down to that depth.
        """
        sent = (headers or {}) | self._script_headers(script, say)
        key = self.key if key is None else key
        auth = {"authorization": f"Bearer {key}"} if key else {}
        given: Json = {"content": content} if content is not None else {"files": files} if files else {"json": body}
        response = await self._http.request(method, path, headers=auth | sent, **given)
        self.last = response
        if record and "x-request-id" in response.headers and path.partition("?")[0] not in QUIET_PATHS:
            self._request_ids.append(response.headers["x-request-id"])
        request = {"method": method, "path": shown_path or path, "headers": sent or None}
        request["body"] = body if content is None else _shortened(content.decode("utf-8", "replace"))
        answer, shown = _read(response)
        shown = {"names": _names(answer, names_only)} if names_only else shown
        reply = {"status": response.status_code, "headers": _headers(response.headers.multi_items()), **shown}
        if record:
            self._exchanges.append({"request": _without_none(request), "response": reply})
        return answer

    async def leave(self, path: str, body: Json, *, after: str, script: str, say: str) -> list[Json]:
        """Send a request that is streamed and disconnect during the step after the one whose reply contains `after`.

        Returns the events so far.
        """
        sent, text = self._script_headers(script, say), ""
        auth = {"authorization": f"Bearer {self.key}"}
        async with self._http.stream("POST", path, headers=auth | sent, json=body) as response:
            async for piece in response.aiter_text():
                text += piece
                if after in text:
                    await asyncio.sleep(IN_STEP_S)
                    break
        self._request_ids.append(response.headers["x-request-id"])
        reply = {"status": response.status_code, "headers": _headers(response.headers.multi_items())}
        events = parse_events(text)
        reply["events_before_the_client_left"] = merge_deltas(events)
        request = {"method": "POST", "path": path, "headers": sent, "body": body}
        self._exchanges.append({"request": request, "response": reply})
        return events

    def _script_headers(self, script: str, say: str) -> dict[str, str]:
        """The header that tells the stand-in engine what to do; none if it has no script."""
        if say:
            script = f"say={'.'.join(map(str, self.stage.token_ids(say)))},{script}".rstrip(",")
        return {"x-session-affinity": f"standin:{script}"} if script else {}

    async def billed(self) -> None:
        """Wait for the account's usage row: the engine reports what it computed once its current step is over."""
        end_s = time.monotonic() + PATIENCE_S
        while not self.stage.usage_rows(self.account):
            assert time.monotonic() < end_s, "there is no usage row"
            await asyncio.sleep(0.02)

    def note(self, name: str, value: Json) -> None:
        """Record something else that is seen from outside, in its place among the exchanges."""
        self._exchanges.append({name: value})

    async def settled(self, is_over: Callable[[Json], bool]) -> Json:
        """The whole record, as soon as `is_over` accepts it or it has not changed for the stage's `settle_s`.

        The server answers a failed request before it has written the usage row and the log lines.
        """
        await self.logged()
        record, changed_s = self.record(), time.monotonic()
        while not is_over(record):
            if time.monotonic() > changed_s + self.stage.settle_s:
                self.stage.settle_s = SETTLE_S
                break
            await asyncio.sleep(0.005)
            before, record = record, self.record()
            changed_s = changed_s if record == before else time.monotonic()
        return record

    def record(self) -> Json:
        """Everything that is seen so far."""
        upstream = [
            {"server": name, **_received(request)}
            for name, standin in self.stage.standins.items()
            for request in standin.received
        ]
        return _without_empty({"exchanges": self._exchanges, "upstream": upstream, **self.ledger()})

    def ledger(self) -> Json:
        """The usage rows of the account and the log lines of its requests and jobs.

        The lines of each logger are apart, because loggers race.
        """
        log = self.stage.log
        found: list[Json] = []
        for name in self._request_ids:
            found += sorted(log.lines(name), key=lambda line: line["logger"])
        jobs = [line for line in log.lines_of_account(self.account) if line not in found]
        found += sorted(jobs, key=lambda line: (line["model"], line["message"]))
        return _without_empty({"usage": self.stage.usage_rows(self.account), "log": found})

    async def logged(self) -> None:
        """Wait for the lines that end the requests so far."""
        end_s = time.monotonic() + PATIENCE_S
        for request_id in self._request_ids:
            while not self.stage.log.has_ended(request_id):
                assert time.monotonic() < end_s, f"request {request_id} was not logged"
                await asyncio.sleep(0.002)


def one(name: str, path: str, body: Json = None, *, method: str = "POST", **options: Any) -> Case:
    """A case of one request."""
    limits, key = options.pop("limits", None), options.pop("account_key", None)

    async def run(client: Client) -> None:
        await client.send(method, path, body, **options)

    return Case(name, run, limits, key)


def whole_and_streamed(name: str, path: str, body: Json, **options: Any) -> Iterable[Case]:
    """Two cases: the request as it is, and streamed."""
    yield one(f"{name}-whole", path, body, **options)
    yield one(f"{name}-streamed", path, {**body, "stream": True}, **options)


def _read(response: httpx.Response) -> tuple[Json, Json]:
    """The decoded body, and the part of the record that shows it."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind == "text/event-stream":
        events = parse_events(response.text)
        return events, {"events": merge_deltas(events)}
    if kind == "application/json" and response.content:
        body = response.json()
        return body, {"body": body}
    with contextlib.suppress(ValueError):
        lines = [json.loads(line) for line in response.text.splitlines()]
        return lines, {"lines": merge_deltas(lines)} if lines else {}
    return response.text, ({"text": _shortened(response.text)} if response.content else {})


def _names(value: Json, depth: int) -> Json:
    """The names of fields down to a depth. Those of a list are the names that its elements have together."""
    if isinstance(value, list):
        merged: Json = {}
        for item in value:
            merged |= item if isinstance(item, dict) else {}
        return [_names(merged, depth)] if merged else []
    if not isinstance(value, dict):
        return "value"
    return {name: _names(item, depth - 1) for name, item in value.items()} if depth else "object"


def _received(request: Any) -> Json:
    """A request as a stand-in has received it."""
    path, _, query = request.path.partition("?")
    shown = {"method": request.method, "path": path, "query": parse_qs(query) or None}
    shown["headers"] = _headers(request.headers.items())
    try:
        shown["body"] = json.loads(request.body)
    except ValueError:
        shown["body"] = _shortened(request.body.decode("utf-8", "replace"))
    return _without_none(shown)


def _headers(items: Iterable[tuple[str, str]]) -> Json:
    return {name: value for name, value in items if name not in CONNECTION_HEADERS}


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"


def _without_empty(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value}


def _without_none(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}
