"""The terminal's own matters."""

import io
import sys

import pytest

from emberline.cli.terminal import passing


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Screen(), "wait …"), (io.StringIO(), "")])
def test_a_passing_line_is_for_people_and_goes_away(
    stream: io.StringIO, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with passing("wait …"):
        assert stream.getvalue() == shown
    assert stream.getvalue() == (f"{shown}\r\x1b[K" if shown else "")
