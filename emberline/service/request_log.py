"""One log line per request. It comes after settling, so that a row that was not written is told here too."""

import asyncio
import logging
import time

from emberline.accounts.usage_ledger import UsageRow
from emberline.protocol.errors import EmberlineError

log = logging.getLogger("emberline.request")


def log_end(engine: str, row: UsageRow, error: Exception | None, settling: "asyncio.Task[None]") -> None:
    unsettled = None if settling.cancelled() else settling.exception()
    problem = error or unsettled
    level = logging.ERROR if unsettled is not None else logging.WARNING if problem is not None else logging.INFO
    if not log.isEnabledFor(level):
        return
    first_us = row.first_token_us
    log.log(
        level,
        "%s",
        row.status if problem is None else f"{row.status}: {problem}",
        extra={
            "request_id": row.id,
            "status": row.status,
            "error": problem.kind if isinstance(problem, EmberlineError) else problem and type(problem).__name__,
            "account": row.account,
            "model": row.model,
            "engine": engine,
            "prompt_tokens": row.input_tokens,
            "cached_tokens": row.cached_tokens,
            "completion_tokens": row.output_tokens,
            "ttft_ms": None if first_us is None else (first_us - row.created_us) // 1000,
            "duration_ms": (row.finished_us - row.created_us) // 1000,
        },
    )


class Clock:
    __slots__ = ("_started_s", "created_us")

    def __init__(self) -> None:
        self.created_us = time.time_ns() // 1000  # Unix time
        self._started_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def now_us(self) -> int:
        return self.created_us + int(1e6 * self.elapsed_s())
