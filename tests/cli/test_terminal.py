"""Terminal output."""

import io
import sys

import pytest

from emberline.cli.terminal import transient_line


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Screen(), "wait …"), (io.StringIO(), "")])
def test_transient_line_is_shown_on_terminals_only_and_erased(
    stream: io.StringIO, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with transient_line("wait …"):
        assert stream.getvalue() == shown
    assert stream.getvalue() == (f"{shown}\r\x1b[K" if shown else "")
