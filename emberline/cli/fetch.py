"""A model onto this machine, with a progress bar where a person looks on."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from emberline.catalog.download import DownloadProgress, ReportProgress
from emberline.catalog.model_store import ModelEntry, ModelStore
from emberline.catalog.pull import pull
from emberline.protocol.errors import BadInput
from emberline.weights.model_config import BadCheckpoint

if TYPE_CHECKING:
    from emberline.text.text_model import TextModel


def fetch(name: str, shelf: ModelStore) -> ModelEntry:
    """The model of that name, pulled if it is not here yet."""
    entry = shelf.find(name)
    if entry is not None:
        return entry
    with _bar(name) as report:
        return pull(name, shelf, report)


def load_text(entry: ModelEntry) -> "TextModel":
    """The model's tokenizer and chat template; without them its weights are of no use here."""
    from emberline.text.text_model import TextModel

    try:
        return TextModel.load(entry.path)
    except BadCheckpoint as error:
        raise BadInput(f"{entry.path} cannot be served: {error}") from None


@contextmanager
def _bar(name: str) -> Iterator[ReportProgress | None]:
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

        def report(progress: DownloadProgress) -> None:
            bar.update(task, completed=progress.done_bytes, total=progress.total_bytes or None)

        yield report
