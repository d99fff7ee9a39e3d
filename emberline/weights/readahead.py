"""Reads a model's files into the page cache while the process is still importing what it needs to use them."""

import os
import threading
from collections.abc import Iterable
from pathlib import Path

_PIECE_BYTES = 8 << 20
_N_THREADS = 6


class ReadAhead:
    """Threads that read files from their beginning. A read needs no interpreter: an import goes on beside it."""

    def __init__(self, paths: Iterable[Path], limit_bytes: int) -> None:
        self._pieces = iter(_pieces(paths, limit_bytes))
        self._lock = threading.Lock()
        self._stopped = False
        self.n_bytes = 0
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_N_THREADS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Whoever uses the files reads them from now on."""
        self._stopped = True
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        scratch = bytearray(_PIECE_BYTES)
        opened: dict[Path, int] = {}
        try:
            while not self._stopped:
                with self._lock:
                    piece = next(self._pieces, None)
                if piece is None:
                    return
                path, offset = piece
                if path not in opened:
                    opened[path] = os.open(path, os.O_RDONLY)
                n = os.preadv(opened[path], [scratch], offset)
                with self._lock:
                    self.n_bytes += n
        except OSError:
            return  # whoever needs the bytes will say what is wrong with them
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def _pieces(paths: Iterable[Path], limit_bytes: int) -> Iterable[tuple[Path, int]]:
    for path in paths:
        try:
            size = path.stat().st_size
        except OSError:
            continue
        for offset in range(0, size, _PIECE_BYTES):
            if limit_bytes <= 0:
                return
            limit_bytes -= _PIECE_BYTES
            yield path, offset


def model_files(model: Path) -> list[Path]:
    """What of a model is worth reading early."""
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
