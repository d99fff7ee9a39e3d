"""Golden files: compare a record with its file, or write the file with `EMBERLINE_GOLDEN=write`."""

import difflib
import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
CONTEXT_LINES = 4


def is_writing() -> bool:
    """True if golden files are to be written instead of compared."""
    return os.environ.get("EMBERLINE_GOLDEN") == "write"


def check(path: Path, record: Any) -> None:
    """Compare a record with its golden file, and show a unified diff where they differ."""
    text = as_text(record)
    if is_writing():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    name = path.relative_to(FOLDER)
    golden = read(path)
    assert golden, f"{name} is missing: write it with EMBERLINE_GOLDEN=write, and read it"
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), f"golden/{name}", f"now/{name}", lineterm="", n=CONTEXT_LINES
    )
    difference = "\n".join(lines)
    if difference:
        message = f"The behaviour has changed; EMBERLINE_GOLDEN=write accepts the change.\n{difference}"
        pytest.fail(message, pytrace=False)


def read(path: Path) -> str:
    """A golden file; empty if there is none."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def as_text(record: Any) -> str:
    """A record as its golden file has it."""
    if isinstance(record, str):
        return record
    return json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def check_all_used(folder: Path, names: set[str]) -> None:
    """Every file of the folder belongs to one of `names` (paths in it without .json), and the other way round."""
    found = {str(path.relative_to(folder).with_suffix("")) for path in folder.rglob("*.json")}
    assert found - names == set(), "golden files without a case: delete them"
    assert names - found == set(), "cases without a golden file: write them with EMBERLINE_GOLDEN=write"
