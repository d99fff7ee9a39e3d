"""Changes of single keys in emberline.toml that leave all else as it is: comments, order and spacing."""

import difflib
import os
import re
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from emberline.protocol.errors import BadInput

Changes = Mapping[tuple[str, str], int | str]  # values by section and key
_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(#.*)?$")


def edited(text: str, changes: Changes) -> str:
    """The text with some keys set. Raises BadInput if it cannot be changed line by line."""
    lines = text.splitlines()
    for (section, key), value in changes.items():
        _set(lines, section, key, str(value) if isinstance(value, int) else f'"{value}"')
    result = "\n".join(lines) + "\n"
    try:
        before, after = tomllib.loads(text), tomllib.loads(result)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"the configuration cannot be changed automatically: {error}") from None
    for (section, key), value in changes.items():
        before.setdefault(section, {})[key] = value
    if before != after:
        raise BadInput("the configuration cannot be changed automatically: set the keys by hand")
    return result


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    """Replace the line of a key, or add one at the end of its section, which is added if there is none."""
    current, end = "", None
    assignment = re.compile(rf"\s*{re.escape(key)}\s*=")
    for place, line in enumerate(lines):
        header = _HEADER.match(line)
        if header is not None:
            current = header[1].strip()
        if current != section or line.lstrip().startswith("[["):
            continue
        if assignment.match(line):
            comment = re.search(r"\s+#[^\"']*$", line)
            lines[place] = f"{key} = {value}{comment[0] if comment else ''}"
            return
        if line.strip():
            end = place + 1
    if end is not None:
        lines.insert(end, f"{key} = {value}")
    else:
        lines += [*([""] if lines else []), f"[{section}]", f"{key} = {value}"]


def difference(path: Path, before: str, after: str) -> str:
    """A unified diff of two versions of the file."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"{path} (now)", f"{path} (new)", lineterm="")
    return "\n".join(lines)


def replace_file(path: Path, text: str) -> Path | None:
    """Write the file anew in one step. Returns where the version before is kept, None if there was none."""
    backup = None
    if path.exists():
        backup = path.with_name(f"{path.name}.before-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        _write(backup, path.read_bytes(), path.stat().st_mode & 0o777)
    part = path.with_name(f".{path.name}.part-{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(part, text.encode(), path.stat().st_mode & 0o777 if path.exists() else 0o600)
    part.replace(path)
    return backup


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file that may hold keys: nobody but its owner can open it before it has its mode."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)
