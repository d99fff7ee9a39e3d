"""Terminal input with line editing and history, and output that cannot move the cursor."""

import contextlib
import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_HISTORY = 1000  # lines
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """Text without control characters: a model's output must not control the terminal."""
    return text.translate(_CONTROL)


class WordWrap:
    """Breaks lines between words, in text that arrives in pieces. The last word is held back until it is complete."""

    def __init__(self, columns: int | None = None) -> None:
        self._fixed = columns
        self._column = 0
        self._gap = ""  # spaces that are only written if a word follows on the same line
        self._word = ""

    def push(self, text: str) -> str:
        """The text to write now."""
        return "".join(map(self._take, text))

    def finish(self) -> str:
        return self._flush()

    def _take(self, char: str) -> str:
        if char == "\n":
            written = self._flush() + char
            self._column, self._gap = 0, ""
            return written
        if char in " \t":
            written = self._flush()
            self._gap += " " if char == " " else "    "
            return written
        if unicodedata.east_asian_width(char) in "WF":  # scripts without spaces break anywhere
            written = self._flush()
            self._word = char
            return written + self._flush()
        self._word += char
        return ""

    def _flush(self) -> str:
        if not self._word:
            return ""
        width = sum(_width(char) for char in self._word)
        gap, word, self._gap, self._word = self._gap, self._word, "", ""
        if self._column and self._column + len(gap) + width > self._columns:
            self._column = width
            return "\n" + word
        self._column += len(gap) + width
        return gap + word

    @property
    def _columns(self) -> int:
        return self._fixed or shutil.get_terminal_size().columns or 80


def _width(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


@contextlib.contextmanager
def transient_line(text: str, elsewhere: bool = False) -> Iterator[None]:
    """A line shown on a terminal while the block runs, with the seconds it has taken, and erased afterwards.

    `elsewhere`: it is printed where standard error is no terminal, and stays."""
    if not sys.stderr.isatty():
        if elsewhere:
            print(text, file=sys.stderr)
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    done, began_s = threading.Event(), time.monotonic()

    def count() -> None:
        while not done.wait(1.0):
            print(f"\r\x1b[K{text} {time.monotonic() - began_s:.0f} s", end="", file=sys.stderr, flush=True)

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        yield
    finally:
        done.set()
        counter.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def byte_progress(title: str, n_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left, on a terminal. The function takes the number of bytes that were moved."""
    if not sys.stderr.isatty():
        yield lambda moved: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=n_bytes)
        yield lambda moved: bar.advance(task, moved)


class LineReader:
    """Reads what the user types: one line at a time, or a text between triple quotes."""

    def __init__(self, history: Path) -> None:
        self._history = history
        try:
            import readline
        except ImportError:  # without readline, input() has no history
            return
        with contextlib.suppress(OSError):
            readline.read_history_file(history)
        readline.set_history_length(MAX_HISTORY)

    def lines(self) -> Iterator[str]:
        """Yield the lines that the person types until Ctrl-D. Ctrl-C clears the line."""
        while True:
            try:
                line = self._read().strip()
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit to leave)")
                continue
            except EOFError:
                print()
                return
            if line:
                self._save_history()
                yield line

    def _read(self) -> str:
        line = input(">>> ")
        if not line.lstrip().startswith('"""'):
            return line
        text = line.lstrip()[3:]
        while not text.rstrip().endswith('"""'):
            text += "\n" + input("... ")
        return text.rstrip()[:-3]

    def _save_history(self) -> None:
        try:
            import readline
        except ImportError:
            return
        with contextlib.suppress(OSError):
            self._history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(self._history)
