"""Log lines: what is in them, in both forms, and that a client's text cannot forge one."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from emberline import log as logs

logger = logging.getLogger("emberline.test")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _root_logger_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_has_the_request_the_process_and_the_extras() -> None:
    out = io.StringIO()
    logs.setup("core", "info", "auto", out)
    context = logs.request_id.set("r-1")
    logger.info("hello %s", "there", extra={"ms": 3, "_added_by_a_library": 4})
    logs.request_id.reset(context)
    logger.debug("too fine")
    logger.warning("second\nline")
    first, second = lines(out)
    assert first.items() >= {"level": "info", "process": "core", "request_id": "r-1", "message": "hello there"}.items()
    assert first["ms"] == 3
    assert "_added_by_a_library" not in first
    assert first["logger"] == "emberline.test"
    assert first["time"].endswith("Z")
    assert (second["request_id"], second["message"]) == ("", "second\nline")


def test_an_exception_stays_in_its_line() -> None:
    out = io.StringIO()
    logs.setup("core", "info", "json", out)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("it failed")
    (line,) = lines(out)
    assert line["exception"].endswith("ValueError: broken")


def test_a_terminal_gets_short_lines_that_stay_one_line() -> None:
    out = Terminal()
    logs.setup("core", "info", "auto", out)
    context = logs.request_id.set("r-1")
    logger.info("GET /%s", "\x1b[2Jx\nfake", extra={"status": 200})
    logs.request_id.reset(context)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("core       GET /\\x1b[2Jx\\x0afake status=200 [r-1]")


def test_level_and_format_of_a_child_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_LOG_LEVEL", "error")
    monkeypatch.setenv("EMBERLINE_LOG_FORMAT", "json")
    out = Terminal()
    logs.setup("engine", stream=out)
    logger.warning("not shown")
    logger.error("shown")
    assert [line["message"] for line in lines(out)] == ["shown"]


@pytest.mark.parametrize("text", ["plain words", "[1, 2]", '{"no": "message"}', '"text"', "{broken"])
def test_whatever_a_child_writes_is_carried_on(text: str) -> None:
    out = io.StringIO()
    logs.setup("core", "info", "json", out)
    logs.relay(text, process="worker-0")
    (line,) = lines(out)
    assert (line["message"], line["process"], line["level"]) == (text, "worker-0", "info")


def test_a_childs_own_line_keeps_its_fields() -> None:
    child, parent = io.StringIO(), io.StringIO()
    logs.setup("engine", "info", "json", child)
    context = logs.request_id.set("r-9")
    logger.error("bad step", extra={"step": 4, "name_of": "x"})
    logs.request_id.reset(context)
    logs.setup("core", "info", "json", parent)
    logs.relay(child.getvalue().strip(), process="worker-0")
    (before,), (after,) = lines(child), lines(parent)
    before.pop("time"), after.pop("time")
    assert after == {**before, "process": "worker-0"}


def test_every_line_of_a_child_says_which_rank_it_is() -> None:
    child, parent = io.StringIO(), io.StringIO()
    logs.setup("engine", "info", "json", child, extra={"rank": 1})
    logging.getLogger("emberline.test").info("ready")
    logs.setup("core", "info", "json", parent)
    logs.relay(child.getvalue().strip(), process="m-0")
    logging.getLogger("emberline.test").info("own")
    ready, own = lines(parent)
    assert (ready["process"], ready["rank"]) == ("m-0", 1)
    assert "rank" not in own
