"""Structured logs, the same in every process: one line per record on stderr, the request's id in each.

JSON lines for machines, short coloured lines for a person at a terminal. Loggers are the standard ones; fields beside
the message go into `extra`. Standard library only, so an engine host can use it too.
"""

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any, TextIO

request_id: ContextVar[str] = ContextVar("request_id", default="")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("auto", "human", "json")

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "request_id", "process_name", "taskName"}
# A client's text reaches log lines: on a terminal it must not move the cursor or forge a line.
_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}


def setup(process: str, level: str = "", format: str = "", stream: TextIO | None = None) -> None:
    """Send every logger of this process, named `process` in its lines, to `stream` (stderr).

    An empty level or format is taken from EMBERLINE_LOG_LEVEL and EMBERLINE_LOG_FORMAT, as a child process wants it.
    """
    level = level or os.environ.get("EMBERLINE_LOG_LEVEL", "info")
    format = format or os.environ.get("EMBERLINE_LOG_FORMAT", "auto")
    out = stream or sys.stderr
    handler = logging.StreamHandler(out)
    if format == "human" or (format == "auto" and out.isatty()):
        handler.setFormatter(HumanFormatter(colour=out.isatty() and "NO_COLOR" not in os.environ))
    else:
        handler.setFormatter(JsonFormatter())
    handler.addFilter(_Stamp(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # One line per connection or per file lock helps nobody; their warnings do.
    for chatty in ("asyncio", "httpcore", "httpx", "filelock", "urllib3", "huggingface_hub", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def fields(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller passed as `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _PLAIN}


class _Stamp(logging.Filter):
    """Marks a record with its process and request, unless it came with them (from a child process)."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.setdefault("process_name", self.process)
        record.__dict__.setdefault("request_id", request_id.get())
        return True


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
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
        return json.dumps(line, ensure_ascii=False, default=str)


class HumanFormatter(logging.Formatter):
    def __init__(self, colour: bool) -> None:
        super().__init__()
        self.colour = colour

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
        line = line.translate(_VISIBLE)
        if self.colour and record.levelname in _COLOURS:
            line = f"{_COLOURS[record.levelname]}{line}\x1b[0m"
        return f"{line}\n{trace}" if trace else line


def relay(line: str, process: str, default_level: int = logging.INFO) -> None:
    """Log again, here, a line that a child process wrote: one of our JSON lines, or any text."""
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
    extra = {key: value for key, value in child.items() if key not in _PLAIN or key == "request_id"}
    extra["process_name"] = process
    logging.getLogger(name).log(level, "%s", message, extra=extra)
