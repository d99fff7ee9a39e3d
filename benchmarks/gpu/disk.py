"""How fast the drive gives a file's bytes, past the page cache: what a start is measured against."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_PIECE = 16 << 20


def direct_rate(path: Path, n_bytes: int = 4 << 30, threads: int = 12) -> float:
    """Bytes a second of many threads."""
    n_bytes = min(n_bytes, path.stat().st_size) // _PIECE * _PIECE
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(offset: int) -> None:
        buffer = mmap.mmap(-1, _PIECE)  # aligned, as direct reads must be
        os.preadv(descriptor, [buffer], offset)
        buffer.close()

    try:
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(0, n_bytes, _PIECE)))
        return n_bytes / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
