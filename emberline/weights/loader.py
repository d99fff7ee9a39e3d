"""Loading weights to a device at the drive's speed: threads read pieces of files and copy them while others read.

A tensor whose dtype and order match the file goes from the drive through pinned memory to the device. It is read with
O_DIRECT, unless its bytes are in the page cache or were read ahead. A losslessly compressed one is read in the same
ways into memory of the thread, or left where it was read ahead, and decoded from there into the pinned memory. Other
tensors are converted on the host first, by the same threads.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from emberline.weights.lossless_tensor import LosslessRows, PlaneBytes
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.readahead import ReadAhead, direct_memory, resident
from emberline.weights.tensors import LOADED_BYTES, Bytes, FileLocation, Weight

_ALIGNED = 4096  # alignment of O_DIRECT reads
PIECE_BYTES = LOADED_BYTES  # a buffer, with room to align them, has a power of two: pinned memory is rounded up to one
N_THREADS = 8
_log = logging.getLogger(__name__)
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "u8": torch.uint8}


class FileBytes(NamedTuple):
    path: Path
    offset: int
    n: int


class FilePiece(NamedTuple):
    location: FileLocation
    mapped: int  # address of the same bytes in the memory-mapped file
    target: Tensor  # uint8, contiguous

    @property
    def stored(self) -> list[FileBytes]:
        return [FileBytes(*self.location, self.target.nbytes)]

    def run(self, reader: "_Reader") -> None:
        reader.copy(self)


class CodedPiece(NamedTuple):
    rows: LosslessRows
    target: Tensor  # uint8, contiguous

    @property
    def stored(self) -> list[FileBytes]:
        return _stored(self.rows)

    def run(self, reader: "_Reader") -> None:
        reader.decode(self)


class HandedPiece(NamedTuple):
    """Rows of a BF16 matrix as they are stored, which are handed over in the thread's pinned memory."""

    weight: Weight
    consume: Callable[[Tensor], None]

    @property
    def stored(self) -> list[FileBytes]:
        raw, location = self.weight.raw, self.weight.location
        if isinstance(raw, LosslessRows):
            return _stored(raw)
        assert location is not None
        return [FileBytes(*location, raw.nbytes)]

    def run(self, reader: "_Reader") -> None:
        reader.hand_over(self.weight, self.consume)


class HostPiece(NamedTuple):
    """A weight that is converted on the host, or handed over after that."""

    weight: Weight
    run: "Callable[[_Reader], None]"

    @property
    def stored(self) -> list[FileBytes]:
        raw = self.weight.raw
        return _stored(raw) if isinstance(raw, LosslessRows) and self.weight.order is None else []


Piece = FilePiece | CodedPiece | HandedPiece | HostPiece


def _stored(rows: LosslessRows) -> list[FileBytes]:
    return [FileBytes(each.path, each.offset, each.mapped.nbytes) for each in rows.stored() if each.mapped.nbytes]


@dataclass(slots=True)
class LoadTimes:
    """Seconds of a loader's threads, and the bytes of files that they took."""

    ahead_bytes: int = 0  # that were read ahead
    read_bytes: int = 0  # by the threads themselves
    read_s: float = 0.0
    decode_s: float = 0.0
    device_s: float = 0.0  # until earlier copies to the device had ended
    hand_over_s: float = 0.0  # for consumers, such as those that pack weights

    def add(self, other: "LoadTimes") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class WeightLoader:
    """Collects which weight goes into which tensor, then reads everything once, in file order."""

    def __init__(self, device: torch.device | str, read_ahead: ReadAhead | None = None) -> None:
        self._device = torch.device(device)
        self._read_ahead = read_ahead
        self._pieces: list[Piece] = []
        self._pool: ThreadPoolExecutor | None = None
        self._reading: list[Future[None]] = []
        self._readers: list[_Reader] = []
        self._actions: list[Callable[[], None]] = []
        self._n_bytes = 0
        self._began_s = 0.0

    def fill(self, weight: Weight, target: Tensor) -> None:
        """Schedule the weight to be read into `target`, which must not be used before `finish`."""
        as_is = _DTYPES.get(weight.kind) == target.dtype and weight.order is None and not weight.shift
        as_is &= not weight.transposed and target.is_contiguous()
        if as_is and isinstance(weight.raw, LosslessRows):
            self._fill_coded(weight.raw, target)
            return
        if not as_is or weight.location is None:
            self._pieces.append(HostPiece(weight, lambda reader: reader.convert(weight, target)))
            return
        assert target.nbytes == weight.raw.nbytes, f"{weight.name} does not fit its tensor"
        flat = target.view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), PIECE_BYTES):
            piece = flat[start : start + PIECE_BYTES]
            mapped = weight.raw.ctypes.data + start
            location = FileLocation(weight.location.path, weight.location.offset + start)
            self._pieces.append(FilePiece(location, mapped, piece))

    def _fill_coded(self, rows: LosslessRows, target: Tensor) -> None:
        flat, start = target.view(-1).view(torch.uint8), 0
        for part in rows.pieces(PIECE_BYTES):
            self._pieces.append(CodedPiece(part, flat[start : start + part.nbytes]))
            start += part.nbytes

    def read(self, weight: Weight, consume: Callable[[Tensor], None]) -> None:
        """Schedule a BF16 weight to be read and handed to `consume` on the host. What `consume` starts on a device, it
        starts on the thread's stream, or has that stream wait for it."""
        as_is = weight.order is None and not weight.shift and not weight.transposed
        if as_is and weight.raw.nbytes <= PIECE_BYTES and (weight.location or isinstance(weight.raw, LosslessRows)):
            self._pieces.append(HandedPiece(weight, consume))
        else:
            self._pieces.append(HostPiece(weight, lambda reader: reader.hand_over_converted(weight, consume)))

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when everything is read, on the thread that calls `finish`: to rearrange what was read."""
        self._actions.append(action)

    def start(self) -> None:
        """Start reading everything scheduled, on threads."""
        self._began_s = time.monotonic()
        if self._read_ahead is not None:
            self._read_ahead.stop()
        pieces, self._pieces = self._in_order(), []
        self._n_bytes = sum(piece.target.nbytes for piece in pieces if isinstance(piece, FilePiece | CodedPiece))
        local = threading.local()

        def run(piece: Piece) -> None:
            if not hasattr(local, "reader"):
                local.reader = _Reader(self._device, self._read_ahead)
                self._readers.append(local.reader)
            piece.run(local.reader)

        self._pool = ThreadPoolExecutor(N_THREADS, "weights")
        self._reading = [self._pool.submit(run, piece) for piece in pieces]

    def _in_order(self) -> list[Piece]:
        """By file and offset, but those that were read ahead evenly among the others, so that the drive never waits.
        Pieces that are not read by their place in a file come last."""
        located = [(piece.stored, piece) for piece in self._pieces]
        ahead: list[Piece] = []
        others: list[Piece] = []
        for stored, piece in sorted((each for each in located if each[0]), key=lambda each: each[0][0]):
            (ahead if self._expect(stored) else others).append(piece)
        place = {id(piece): (n + 0.5) / len(part) for part in (ahead, others) for n, piece in enumerate(part)}
        return sorted(ahead + others, key=lambda piece: place[id(piece)]) + [piece for at, piece in located if not at]

    def _expect(self, stored: list[FileBytes]) -> bool:
        """True if all these bytes were read ahead. Those that were are kept until they are copied."""
        if self._read_ahead is None:
            return False
        found = [self._read_ahead.expect(*each) for each in stored]
        return all(found)

    def __enter__(self) -> "WeightLoader":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Read no more, and wait for what is being read. For a start that fails: a process ends when its threads do."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def finish(self) -> int:
        """Wait until everything is read, starting if `start` was not called; returns the bytes. Raises read errors."""
        if self._pool is None:
            self.start()
        assert self._pool is not None
        try:
            for job in self._reading:
                job.result()
        finally:
            self.stop()
        for reader in self._readers:
            reader.close()
        self._log_times()
        for action in self._actions:
            action()
        self._actions = []
        return self._n_bytes

    def _log_times(self) -> None:
        times = LoadTimes()
        for reader in self._readers:
            times.add(reader.times)
        facts = asdict(times) | {"threads": len(self._readers), "loading_s": time.monotonic() - self._began_s}
        if self._read_ahead is not None:
            facts["ahead_s"] = self._read_ahead.seconds
        _log.info("weights were read", extra={name: round(value, 3) for name, value in facts.items()})


class _Reader:
    """One thread's open files, CUDA stream and two buffers: one is filled while the other is copied to the device.
    Planes of compressed tensors are read into buffers of their own."""

    def __init__(self, device: torch.device, read_ahead: ReadAhead | None) -> None:
        self._read_ahead = read_ahead
        self._cuda = device.type == "cuda"
        size = PIECE_BYTES + 2 * _ALIGNED
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(2)]
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copied: list[Any] = [None, None]
        self._plane_buffers: dict[bool, Bytes] = {}
        self._files: dict[Path, _File] = {}
        self._viewed: list[FileBytes] = []  # that are read where they were read ahead
        self._turn = 0
        self.times = LoadTimes()
        self._counted_s = 0.0

    def _next_buffer(self) -> Tensor:
        """A buffer whose last content has been copied to the device."""
        self._turn ^= 1
        if self._copied[self._turn] is not None:
            with self._timed("device_s"):
                self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the seconds of a block, without those that were counted within it."""
        begin, counted = time.perf_counter(), self._counted_s
        try:
            yield
        finally:
            took_s = time.perf_counter() - begin
            setattr(self.times, name, getattr(self.times, name) + took_s - (self._counted_s - counted))
            self._counted_s = counted + took_s

    def decode(self, piece: CodedPiece) -> None:
        n = piece.target.nbytes
        if n > PIECE_BYTES:  # a row that is longer than a buffer
            self._send(torch.from_numpy(self._decoded(piece.rows).reshape(-1)), piece.target, pinned=False)
            return
        buffer = self._next_buffer()
        self._decoded(piece.rows, buffer[:n].numpy())
        self._send(buffer[:n], piece.target)

    def _decoded(self, rows: LosslessRows, into: Bytes | None = None) -> Bytes:
        with self._timed("decode_s"):
            try:
                return rows.read(into, self._read_plane)
            finally:
                self._release()

    def _read_plane(self, plane: PlaneBytes) -> Bytes:
        n = plane.mapped.nbytes
        if not n:
            return plane.mapped
        stored = FileBytes(plane.path, plane.offset, n)
        if (found := self._view(stored)) is not None:
            return found
        buffer = self._plane_buffers.get(plane.is_coded)
        if buffer is None or buffer.nbytes < n + 2 * _ALIGNED:
            memory = direct_memory(n + n // 4 + 2 * _ALIGNED)  # the next ones may be a little longer
            buffer = self._plane_buffers[plane.is_coded] = np.frombuffer(memory, np.uint8)
        skip = self._read(stored, plane.mapped.ctypes.data, buffer)
        return buffer[skip : skip + n]

    def _view(self, stored: FileBytes) -> Bytes | None:
        """Some bytes of a file where they were read ahead, until `_release`. None: they were not."""
        found = None if self._read_ahead is None else self._read_ahead.view(*stored)
        if found is not None:
            self._viewed.append(stored)
            self.times.ahead_bytes += stored.n
        return found

    def _release(self) -> None:
        for each in self._viewed:
            assert self._read_ahead is not None
            self._read_ahead.release(*each)
        self._viewed.clear()

    def _read(self, stored: FileBytes, mapped: int, buffer: Bytes) -> int:
        """Read some bytes of a file; returns where they begin in the buffer."""
        path, offset, n = stored
        with self._timed("read_s"):
            if (found := self._view(stored)) is not None:
                np.copyto(buffer[:n], found)
                self._release()
                return 0
            self.times.read_bytes += n
            if path not in self._files:
                self._files[path] = _File(path)
            return self._files[path].read(offset, n, buffer, cached=resident(mapped, n))

    def copy(self, piece: FilePiece) -> None:
        buffer, n = self._next_buffer(), piece.target.nbytes
        skip = self._read(FileBytes(*piece.location, n), piece.mapped, buffer.numpy())
        self._send(buffer[skip : skip + n], piece.target)

    def _numbers(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        if isinstance(weight.raw, LosslessRows) and weight.order is None:
            weight = replace(weight, raw=self._decoded(weight.raw))
        return weight.tensor(dtype, "cpu")

    def convert(self, weight: Weight, target: Tensor) -> None:
        self._send(self._numbers(weight, target.dtype), target, pinned=False)

    def hand_over(self, weight: Weight, consume: Callable[[Tensor], None]) -> None:
        buffer, n, skip = self._next_buffer(), weight.raw.nbytes, 0
        if isinstance(weight.raw, LosslessRows):
            self._decoded(weight.raw, buffer[:n].numpy())
        else:
            assert weight.location is not None
            skip = self._read(FileBytes(*weight.location, n), weight.raw.ctypes.data, buffer.numpy())
        if skip % 2:  # an odd place in the file, which no tensor of 16 bits may have
            self.hand_over_converted(weight, consume)
        else:
            self._give(buffer[skip : skip + n].view(torch.bfloat16).view(weight.shape), consume)

    def hand_over_converted(self, weight: Weight, consume: Callable[[Tensor], None]) -> None:
        self._give(self._numbers(weight, torch.bfloat16), consume, pinned=False)

    def _give(self, numbers: Tensor, consume: Callable[[Tensor], None], pinned: bool = True) -> None:
        with self._timed("hand_over_s"), torch.cuda.stream(self._stream):  # no stream: on the CPU
            consume(numbers)
        self._end_copy(pinned)

    def _send(self, source: Tensor, target: Tensor, pinned: bool = True) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=pinned)
        self._end_copy(pinned)

    def _end_copy(self, pinned: bool) -> None:
        """Let the buffer be used again once the device has read it. Other memory is freed: wait until that is so."""
        if self._cuda and pinned:
            self._copied[self._turn] = self._stream.record_event()
        elif self._cuda:
            self._stream.synchronize()

    def close(self) -> None:
        if self._cuda:
            self._stream.synchronize()
        for file in self._files.values():
            file.close()


class _File:
    """A file opened twice: through the page cache, and with O_DIRECT."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cached = os.open(path, os.O_RDONLY)
        self._direct: int | None = None
        with suppress(OSError, AttributeError):  # not supported by every file system or platform
            self._direct = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(self, offset: int, n: int, buffer: Bytes, cached: bool) -> int:
        """Read n bytes from `offset`, widened to aligned bounds; returns where they begin in the buffer."""
        start = offset - offset % _ALIGNED
        skip = offset - start
        view = buffer.data
        end, have = skip + n, 0
        if self._direct is not None and not cached:
            have = self._read(self._direct, view, start, have, -(-end // _ALIGNED) * _ALIGNED, end)
        if have < end:
            have = self._read(self._cached, view, start, have, end, end)
        if have < end:
            raise BadCheckpoint(f"{self._path.name} ended {end - have} bytes early")
        return skip

    @staticmethod
    def _read(descriptor: int, view: memoryview, start: int, have: int, stop: int, enough: int) -> int:
        while have < enough:
            try:
                got = os.preadv(descriptor, [view[have:stop]], start + have)
            except OSError:
                break
            if not got:
                break
            have += got
        return have

    def close(self) -> None:
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)


class DeferredCheckpoint:
    """A checkpoint whose matrices are read by a loader after the model has allocated their tensors."""

    def __init__(self, source: Any, loader: WeightLoader) -> None:
        self.config = source.config
        self.has = source.has
        self._source = source
        self._loader = loader

    def weight(self, name: str) -> Weight:
        weight: Weight = self._source.weight(name)
        return replace(weight, loader=self._loader)
