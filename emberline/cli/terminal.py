"""Terminal input with line editing and history, and output that cannot move the cursor."""

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

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
    """Show a line on a terminal while the block runs, with the seconds it has taken, and erase it afterwards.

    Log lines and other output of the block to standard error appear above the line. `elsewhere`: the text is printed
    where standard error is no terminal, and stays."""
    if not sys.stderr.isatty():
        if elsewhere:
            print(text, file=sys.stderr)
        yield
        return
    line = _LastLine(sys.stderr, text)
    done, began_s = threading.Event(), time.monotonic()

    def count() -> None:
        while not done.wait(1.0):
            line.show(f"{text} {time.monotonic() - began_s:.0f} s")

    counter = threading.Thread(target=count, daemon=True)
    counter.start()
    try:
        with _written_through(line):
            yield
    finally:
        done.set()
        counter.join()
        line.show("")


class _LastLine:
    """The last line of a terminal, and the file for what others write meanwhile, which appears above the line."""

    def __init__(self, terminal: TextIO, text: str) -> None:
        self.terminal = terminal
        self._lock = threading.RLock()  # a signal handler may write while its thread has the lock
        self._text = ""
        self._is_after_others = False  # what others wrote last has not ended its line
        self.show(text)

    def show(self, text: str) -> None:
        """Replace the line. Without a text it is erased, and others write as they would without it."""
        with self._lock:
            if not self._is_after_others:
                erased = "\r\x1b[K" if self._text else ""
                self._put(erased + text)
            self._text = text

    def write(self, text: str) -> int:
        with self._lock:
            if self._text and text:
                erased = "" if self._is_after_others else "\r\x1b[K"
                self._is_after_others = not text.endswith("\n")
                self._put(erased + text + ("" if self._is_after_others else self._text))
            else:
                self.terminal.write(text)
        return len(text)

    def _put(self, text: str) -> None:
        self.terminal.write(text)
        self.terminal.flush()

    def __getattr__(self, name: str) -> Any:
        """The terminal's own attributes, for callers that ask for its encoding or whether it is a terminal."""
        return getattr(self.terminal, name)


@contextlib.contextmanager
def _written_through(line: _LastLine) -> Iterator[None]:
    """Send standard error, and the root logger's lines that go there, through the line while the block runs."""
    stream = cast(TextIO, line)
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is line.terminal
    ]
    for handler in handlers:
        handler.setStream(stream)
    try:
        with contextlib.redirect_stderr(stream):
            yield
    finally:
        for handler in handlers:
            if handler.stream is stream:
                handler.setStream(line.terminal)


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
