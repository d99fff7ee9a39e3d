"""Structured logs, the same in every process: one line per record on stderr, each with the request id.

JSON lines for machines, short colored lines on a terminal. Loggers are the standard ones; additional fields go into
`extra`. Standard library only, so that an engine host can use it too.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from emberline.protocol import trace_context

request_id: ContextVar[str] = ContextVar("request_id", default="")

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {
    "message",
    "asctime",
    "request_id",
    "process_name",
    "taskName",
    "json_line",
}
# Client text reaches log lines: on a terminal it must not move the cursor or forge a line.
_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_ESCAPED_LINES = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}
_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode  # `json.dumps` would make an encoder for each line
_COLORS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


def setup(
    process: str,
    level: str = "",
    format: str = "",
    stream: TextIO | None = None,
    more: Sequence[logging.Handler] = (),
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Send every logger of this process to `stream` (default stderr) and `more`; `process` names it in each line,
    which has the fields of `extra`, too.

    An empty level or format is read from EMBERLINE_LOG_LEVEL and EMBERLINE_LOG_FORMAT, which child processes inherit.
    """
    level = level or os.environ.get("EMBERLINE_LOG_LEVEL", "info")
    format = format or os.environ.get("EMBERLINE_LOG_FORMAT", "auto")
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    if format == "text" or (format == "auto" and out.isatty()):
        handler.setFormatter(TextFormatter(color=out.isatty() and "NO_COLOR" not in os.environ))
    else:
        handler.setFormatter(JsonFormatter())
    for each in (handler, *more):
        each.addFilter(ContextFilter(process, extra))
    logging.basicConfig(level=level.upper(), handlers=[handler, *more], force=True)
    logging.captureWarnings(True)
    # No line has these, and finding them out takes a third of the time of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    for verbose in ("asyncio", "httpcore", "httpx", "filelock", "urllib3", "huggingface_hub", "uvicorn.access"):
        logging.getLogger(verbose).setLevel(logging.WARNING)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed as `extra`; those with an underscore are some library's own."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS and name[:1] != "_"}


class ContextFilter(logging.Filter):
    """Adds the process name and request id to a record, unless it has them (relayed from a child process)."""

    def __init__(self, process: str, extra: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._defaults = {"process_name": process, **(extra or {})}

    def filter(self, record: logging.LogRecord) -> bool:
        for name, value in self._defaults.items():
            record.__dict__.setdefault(name, value)
        record.__dict__.setdefault("request_id", request_id.get())
        if (trace := trace_context.current.get()) is not None:
            record.__dict__.setdefault("trace_id", trace.trace_id)
            record.__dict__.setdefault("span_id", trace.span_id)
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Once per record: stderr and the log file get the same line."""
        if "json_line" not in record.__dict__:
            record.__dict__["json_line"] = self._format(record)
        return str(record.__dict__["json_line"])

    def _format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "process": vars(record).get("process_name", ""),
            "logger": record.name,
            "request_id": vars(record).get("request_id", ""),
            "message": record.getMessage(),
        }
        line.update(fields(record))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


class TextFormatter(logging.Formatter):
    def __init__(self, color: bool) -> None:
        super().__init__()
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        extra = fields(record)
        trace = extra.pop("exception", None) or (self.formatException(record.exc_info) if record.exc_info else "")
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        process = vars(record).get("process_name", "")
        request = vars(record).get("request_id", "")
        line = f"{clock} {record.levelname.lower():<7} {process:<10} {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in extra.items() if value is not None)
        if request:
            line += f" [{request}]"
        line = line.translate(_ESCAPED)
        if self.color and record.levelname in _COLORS:
            line = f"{_COLORS[record.levelname]}{line}\x1b[0m"
        return f"{line}\n{trace.translate(_ESCAPED_LINES)}" if trace else line


def relay(line: str, process: str, default_level: int = logging.INFO) -> None:
    """Log a line that a child process wrote: a JSON line of this module, or any text."""
    try:
        child = json.loads(line)
    except ValueError:
        child = None
    if not isinstance(child, dict) or "message" not in child:
        child = {"message": line}
    name = str(child.pop("logger", "emberline.child"))
    level = logging.getLevelNamesMapping().get(str(child.pop("level", "")).upper(), default_level)
    child.pop("time", None)
    message = child.pop("message")
    extra = {key: value for key, value in child.items() if key not in _STANDARD_FIELDS or key == "request_id"}
    extra["process_name"] = process
    logging.getLogger(name).log(level, "%s", message, extra=extra)
