"""The log of a predictor: the secrets that it never has."""

import json
import os
from pathlib import Path

import pytest

from emberline.predictor.output_log import MAX_LINE_BYTES, OutputLog

KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nkqhkiG9w0BAQ\n-----END KEY-----\n"
ACCOUNT = '{"id": "x", "token": "a\\"b\nc"}'


@pytest.mark.parametrize(
    ("secrets", "printed", "parts"),
    [
        (("tell-nobody", "tell-nobody-123"), "it is tell-nobody-123", ("tell-nobody", "123")),
        ((KEY,), f"the key:\n{KEY}", ("MIIEvQIBADANBg", "kqhkiG9w0BAQ")),
        ((KEY,), json.dumps({"fields": {"error": KEY}}), ("MIIEvQIBADANBg", "kqhkiG9w0BAQ")),
        ((ACCOUNT,), json.dumps({"fields": {"error": ACCOUNT}}), ("token", "id")),
        ((ACCOUNT,), f"ValueError: {ACCOUNT!r}", ("token", "id")),
        (("tell-nobody",), "x" * (MAX_LINE_BYTES - 4) + "tell-nobody", ("tell", "nobody")),
    ],
)
def test_secrets_are_hidden_however_they_are_printed(
    secrets: tuple[str, ...], printed: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    log = OutputLog(tmp_path / "log", secrets)
    os.write(log.descriptor, printed.encode() + b"\nthe end")
    log.close_writer()
    log.close(10.0)
    found = (tmp_path / "log").read_text()
    assert not [part for part in parts if part in found], found[-500:]
    assert "**********" in found
    assert found.endswith("the end\n")
    assert log.last_line == "the end"
