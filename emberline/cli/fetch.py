"""A model onto this machine, with a progress bar where a person looks on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from emberline.catalog.progress import Progress, Report
from emberline.catalog.pull import pull
from emberline.catalog.shelf import Entry, Shelf


def fetch(name: str, shelf: Shelf) -> Entry:
    """The model of that name, pulled if it is not here yet."""
    entry = shelf.find(name)
    if entry is not None:
        return entry
    with _bar(name) as report:
        return pull(name, shelf, report)


@contextmanager
def _bar(name: str) -> Iterator[Report | None]:
    """A bar on the terminal; elsewhere one line when it begins."""
    if not sys.stderr.isatty():
        print(f"pulling {name}", file=sys.stderr)
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"pulling {name}", total=None)

        def report(progress: Progress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes or None)

        yield report
