"""The gateways' log: one row per request, written in groups off the request's path, and searched by its account.

A row never holds credentials: messages of errors are redacted, and headers are not part of it. Prompts and replies are
recorded only where the gateway or the request asks for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from emberline.net.periodic import every, stop
from emberline.protocol.errors import EmberlineError
from emberline.protocol.gateway import GatewaySettings
from emberline.store import BulkQuery, Database
from emberline.store.database import Rows, Value, decode_row, search_rows

FLUSH_S = 0.25
MAX_GROUP = 500  # rows of one write
MAX_PENDING = 20_000  # rows that wait while the store is away; the oldest are dropped
MAX_CONTENT_CHARS = 64 << 10  # of a prompt, and of a reply
SWEEP_S = 300.0
_SWEEP_ROWS = 5000  # deleted at once, so that requests' writes need not wait

log = logging.getLogger("emberline.gateway")


class LogAttempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt to have a model answer."""

    model: str
    provider: str
    id: str  # of its usage row
    step: int  # the position of its model in the chain, from 0
    duration_ms: float
    waited_ms: float = 0.0  # before it
    error: str = ""  # its kind; empty: this attempt answered
    message: str = ""


class LogRow(msgspec.Struct, kw_only=True):
    id: str
    account: str
    gateway: str
    created_us: int
    key_id: str = ""
    api: str = ""
    requested: str = ""  # the model, or dynamic route, that the client named
    model: str = ""  # that answered, or failed last
    provider: str = ""
    step: int = 0
    status: str = "success"  # success | error | cancelled
    error: str = ""  # the kind of the error
    message: str = ""
    cache_status: str = ""  # HIT | MISS; empty: the cache was not asked
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input, in the provider's prefix cache
    output_tokens: int = 0
    cost_pico: int | None = None  # None: the model has no price
    duration_us: int = 0
    ttft_us: int | None = None
    event_id: str = ""
    metadata: str = ""  # JSON, as the following
    attempts: str = ""
    flags: str = ""  # names of guardrails that matched
    request: str = ""
    response: str = ""


COLUMNS = ", ".join(LogRow.__struct_fields__)
SUMMARY = ", ".join(name for name in LogRow.__struct_fields__ if name not in ("request", "response"))
_INSERT = (
    f"INSERT INTO gateway_logs ({COLUMNS}) VALUES ({', '.join('?' * len(LogRow.__struct_fields__))}) "
    "ON CONFLICT (id) DO NOTHING"
)


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions of a search. None and empty ones match everything."""

    log_id: str = ""
    model: str = ""
    provider: str = ""
    status: str = ""
    error: str = ""
    cached: bool | None = None
    event_id: str = ""
    since_us: int | None = None
    until_us: int | None = None
    min_duration_ms: int | None = None
    metadata: tuple[str, str] | None = None  # a key and its value
    text: str = ""  # in prompts and replies that were recorded
    before: tuple[int, str] | None = None  # time and id of the last row of the page before
    limit: int = 100


class LogWriter:
    """`add` costs an append; rows are in the store within about FLUSH_S."""

    def __init__(
        self, store: Database | None, find_settings: Callable[[str, str], GatewaySettings] | None = None
    ) -> None:
        """`find_settings` returns the settings of a gateway, given its account and name; only `sweep` needs it."""
        self._store = store
        self._find_settings = find_settings
        self._pending: list[LogRow] = []
        self._n_dropped = 0
        self._flushing = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        if self._store is not None:
            works = (self._write_behind(), every(SWEEP_S, self.sweep, log, "log rows were not swept"))
            self._tasks = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        await stop(*self._tasks)
        await self.flush()

    def add(self, row: LogRow) -> None:
        if self._store is None:
            return
        if len(self._pending) >= MAX_PENDING:
            del self._pending[: MAX_PENDING // 10]
            self._n_dropped += MAX_PENDING // 10
        self._pending.append(row)
        self._wake.set()

    async def _write_behind(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            await self.flush()
            if self._pending:
                self._wake.set()

    async def _insert(self, rows: list[LogRow]) -> None:
        assert self._store is not None
        await self._store.transaction([BulkQuery(_INSERT, [_values(row) for row in rows])])

    async def _insert_apart(self, rows: list[LogRow]) -> None:
        """One by one: a row that the store does not take is the only one that is lost."""
        for row in rows:
            try:
                await self._insert([row])
            except EmberlineError:
                raise
            except Exception:
                log.exception("the log row %s was not stored", row.id)

    async def flush(self) -> bool:
        """Write what waits by now. False: the store is away, and the rows are kept."""
        async with self._flushing:
            n_left = len(self._pending)
            while n_left > 0 and self._store is not None:
                n_rows = min(n_left, MAX_GROUP)
                group, self._pending = self._pending[:n_rows], self._pending[n_rows:]
                n_left -= n_rows
                try:
                    try:
                        await self._insert(group)
                    except EmberlineError:
                        raise
                    except Exception:
                        await self._insert_apart(group)
                except EmberlineError as error:
                    self._pending = group + self._pending
                    log.warning("%d log rows wait: %s", len(self._pending), error.message)
                    return False
            if self._n_dropped:
                log.warning("%d log rows were dropped: the store was away for too long", self._n_dropped)
                self._n_dropped = 0
            return True

    # --- retention ---------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Delete rows beyond each gateway's retention, in age and in number."""
        assert self._store is not None
        assert self._find_settings is not None
        for account, gateway, n_rows in await self._store.report(_COUNTS):
            assert isinstance(account, str)
            assert isinstance(gateway, str)
            assert isinstance(n_rows, int)
            try:
                settings = self._find_settings(account, gateway)
                days, most = settings.log_retention_days, settings.log_max_rows
            except EmberlineError:  # a gateway that is gone
                days, most = 30.0, 1_000_000
            end_us = time.time_ns() // 1000 - int(days * 86_400e6)
            # By time, not by number: another process may sweep just now.
            excess = await self._store.report(_NTH, (account, gateway, n_rows - most - 1)) if n_rows > most else ()
            for (created_us,) in excess:
                assert isinstance(created_us, int)
                end_us = max(end_us, created_us + 1)
            while await self._store.read(_ANY, (account, gateway, end_us)):
                await self._store.write(_OLD, (account, gateway, end_us, _SWEEP_ROWS))


_COUNTS = "SELECT account, gateway, COUNT(*) FROM gateway_logs GROUP BY account, gateway"
_OLD = (
    "DELETE FROM gateway_logs WHERE id IN (SELECT id FROM gateway_logs "
    "WHERE account = ? AND gateway = ? AND created_us < ? ORDER BY created_us LIMIT ?)"
)
_ANY = "SELECT id FROM gateway_logs WHERE account = ? AND gateway = ? AND created_us < ? LIMIT 1"
_NTH = "SELECT created_us FROM gateway_logs WHERE account = ? AND gateway = ? ORDER BY created_us LIMIT 1 OFFSET ?"


# --- search -----------------------------------------------------------------------------------------------------------


async def search(store: Database, account: str, gateway: str, wanted: LogFilter) -> list[LogRow]:
    """The newest first. Only a search for one row has its prompt and reply."""
    conditions, params = ["account = ?", "gateway = ?"], [account, gateway]
    values: list[Value] = list(params)

    def add(condition: str, *more: Value) -> None:
        conditions.append(condition)
        values.extend(more)

    for name in ("model", "provider", "status", "error", "event_id"):
        if value := getattr(wanted, name):
            add(f"{name} = ?", value)
    if wanted.log_id:
        add("id = ?", wanted.log_id)
    if wanted.cached is not None:
        add("cache_status = 'HIT'" if wanted.cached else "cache_status <> 'HIT'")
    if wanted.since_us is not None:
        add("created_us >= ?", wanted.since_us)
    if wanted.until_us is not None:
        add("created_us < ?", wanted.until_us)
    if wanted.min_duration_ms is not None:
        add("duration_us >= ?", wanted.min_duration_ms * 1000)
    if wanted.metadata is not None:
        key, text = wanted.metadata
        like = "metadata LIKE ? ESCAPE '!'"
        plain = _like(msgspec.json.encode({key: text}).decode()[1:-1])
        bare = _like(f"{msgspec.json.encode(key).decode()}:{text}")  # a number or a boolean
        add(f"({like} OR {like} OR {like})", f"%{plain}%", f"%{bare},%", f"%{bare}}}")
    if wanted.text:
        lacks = "replace(lower({0}), lower(?), '') = lower({0})"  # LIKE begins anew at each character of a long text
        add(f"NOT ({lacks.format('request')} AND {lacks.format('response')})", wanted.text, wanted.text)
    if wanted.before is not None:
        created_us, log_id = wanted.before
        add("(created_us < ? OR (created_us = ? AND id < ?))", created_us, created_us, log_id)
    columns = COLUMNS if wanted.log_id else SUMMARY
    sql = (
        f"SELECT {columns} FROM gateway_logs WHERE {' AND '.join(conditions)} ORDER BY created_us DESC, id DESC LIMIT ?"
    )
    looks_through = bool(wanted.text) or wanted.metadata is not None
    values.append(wanted.limit)
    rows: Rows = await (search_rows(store, sql, values) if looks_through else store.report(sql, values))
    return [decode_row(LogRow, columns, row) for row in rows]


def _like(text: str) -> str:
    return text.replace("!", "!!").replace("%", "!%").replace("_", "!_")


def shortened(text: str) -> str:
    """A prompt or a reply as it is recorded. PostgreSQL takes neither NUL nor a lone surrogate."""
    return text[:MAX_CONTENT_CHARS].replace("\0", "").encode("utf-8", "replace").decode()


def _values(row: LogRow) -> tuple[Any, ...]:
    """Clients and providers choose most of the texts."""
    values = msgspec.structs.astuple(row)
    texts = "".join([value for value in values if type(value) is str])
    if texts.isascii() and "\0" not in texts:
        return values
    return tuple(shortened(value) if isinstance(value, str) else value for value in values)


def row_body(row: LogRow) -> dict[str, Any]:
    """Return the row in the form that the API and the command line show."""
    body = msgspec.structs.asdict(row)
    cost_pico = body.pop("cost_pico")
    for name in ("metadata", "attempts", "flags"):
        body[name] = msgspec.Raw(body[name]) if body[name] else ({} if name == "metadata" else [])
    body["created_at_us"] = body.pop("created_us")
    body["cached"] = row.cache_status == "HIT"
    body["cost"] = None if cost_pico is None else cost_pico / 1e12
    body["duration_ms"] = body.pop("duration_us") / 1000
    ttft_us = body.pop("ttft_us")
    body["ttft_ms"] = None if ttft_us is None else ttft_us / 1000
    return body
