"""Terminal output."""

import io
import logging
import sys

import pytest

from emberline.cli.terminal import WordWrap, transient_line


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        """The rows that a person sees: without what was erased."""
        return [row.rpartition("\r\x1b[K")[2] for row in self.getvalue().split("\n")]


@pytest.mark.parametrize(("stream", "shown"), [(Screen(), "wait …"), (io.StringIO(), "")])
def test_transient_line_is_shown_on_terminals_only_and_erased(
    stream: io.StringIO, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with transient_line("wait …"):
        assert stream.getvalue() == shown
    assert stream.getvalue() == (f"{shown}\r\x1b[K" if shown else "")


def test_other_output_appears_above_a_transient_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, logger = Screen(), logging.getLogger("test.terminal")
    handler = logging.StreamHandler(screen)
    monkeypatch.setattr(sys, "stderr", screen)
    logging.getLogger().addHandler(handler)
    try:
        with transient_line("wait …"):
            logger.warning("first")
            assert screen.rows == ["first", "wait …"]
            print("half a line,", end=" ", file=sys.stderr)
            assert screen.rows == ["first", "half a line, "]
            print("and the rest", file=sys.stderr)
            logger.warning("last")
            assert screen.rows == ["first", "half a line, and the rest", "last", "wait …"]
        assert screen.rows == ["first", "half a line, and the rest", "last", ""]
        logger.warning("afterwards")
        assert screen.rows[-2:] == ["afterwards", ""]
        assert handler.stream is sys.stderr is screen
    finally:
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_lines_break_between_words(size: int) -> None:
    text = "The quick brown fox  jumps\n\nover the\tlazy dog: extraordinarily-long-word 你好世界你好世界你好 end"
    wrap = WordWrap(columns=20)
    out = "".join(wrap.push(text[at : at + size]) for at in range(0, len(text), size)) + wrap.finish()
    assert out.split("\n") == [
        "The quick brown fox",
        "jumps",
        "",
        "over the    lazy",
        "dog:",
        "extraordinarily-long-word",
        "你好世界你好世界你好",
        "end",
    ]


def test_words_are_written_when_they_are_complete() -> None:
    wrap = WordWrap(columns=20)
    assert wrap.push("Hel") == ""
    assert wrap.push("lo wor") == "Hello"
    assert wrap.finish() == " wor"
