"""Lines of a trace's file, packed or not."""

import gzip
from collections.abc import Iterator
from pathlib import Path

from emberline.protocol.errors import BadInput


def lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from (line for line in file if line.strip())
    except (gzip.BadGzipFile, EOFError) as error:
        raise BadInput(f"{path} is not a whole gzip file: {error}", param="trace") from None
