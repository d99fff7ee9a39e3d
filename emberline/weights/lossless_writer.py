"""Writing one file of a compressed checkpoint, so that it can be continued after a stop, and verifying it.

Data is appended to NAME.part, and each finished tensor is a line of NAME.journal. The header, for which room is left at
the beginning, is written last. The file gets its name once all its numbers have been read back from the drive and
compared with the source's, bit for bit (`lossless_readback`). Coding, SHA-256 of the source and the comparison run
concurrently.
"""

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np

from emberline.weights.lossless_blocks import WIDTHS, CodedBlock, Grid, encode_block
from emberline.weights.lossless_files import (
    BLOCKS,
    CODED,
    HEADER_TENSOR,
    METADATA_KEY,
    REST,
    SMALL_BYTES,
    SUFFIX,
    VERSION,
    FileEntry,
    FileFormat,
    LosslessFile,
    SourceFile,
    TensorEntry,
)
from emberline.weights.lossless_readback import ReadBack, to_the_drive
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.safetensors_file import MAX_HEADER_BYTES, SafeTensor, SafetensorsFile
from emberline.weights.tensors import Bytes

WORTHWHILE = 0.97  # a tensor is coded if that takes less than this share of its bytes
SAMPLED_BLOCKS = 6  # that are coded to find out
_ALIGNED = 4096  # of the data in the file
_PLANE_ALIGNED = 64
_CHUNK_BYTES = 16 << 20
_HASHED_BYTES = 1 << 20  # at a time: what is read stays in the processor's cache until it is hashed
_IN_FLIGHT = 64  # blocks that are coded or written at a time: bounds the memory

# Called with the bytes of the source that have just been compressed, and of those written for them.
Report = Callable[[int, int], None]
T = TypeVar("T")
R = TypeVar("R")


class Written(msgspec.Struct, frozen=True):
    """A line of the journal: a tensor, and where its parts are in the data."""

    name: str
    entry: TensorEntry
    parts: dict[str, SafeTensor]

    @property
    def end(self) -> int:
        return max(part.data_offsets[1] for part in self.parts.values())

    @property
    def n_bytes(self) -> int:
        return sum(part.data_offsets[1] - part.data_offsets[0] for part in self.parts.values())


class Estimate(NamedTuple):
    source: int  # bytes
    stored: int


def estimate_tensor(source: SafetensorsFile, name: str) -> Estimate:
    """Bytes of a tensor, and those that it takes when compressed, as some of its blocks tell."""
    return _estimate(source, name, [_encode(source, name, number) for number in _sampled(source, name)])


def _sampled(source: SafetensorsFile, name: str) -> list[int]:
    """Numbers of the blocks that tell what a tensor gains. Empty if it is stored as it is."""
    tensor = source.tensors[name]
    n_bytes = tensor.data_offsets[1] - tensor.data_offsets[0]
    if tensor.dtype not in WIDTHS or n_bytes <= SMALL_BYTES or len(tensor.shape) < 2:
        return []
    return sorted({int(n) for n in np.linspace(0, Grid.of(tensor.shape).n_blocks - 1, SAMPLED_BLOCKS)})


def _estimate(source: SafetensorsFile, name: str, sampled: list[CodedBlock]) -> Estimate:
    begin, end = source.tensors[name].data_offsets
    if not sampled:
        return Estimate(end - begin, end - begin)
    width = WIDTHS[source.tensors[name].dtype]
    plain = sum(block.n_numbers * width for block in sampled)
    stored = sum(len(block.coded) + block.rest.nbytes + 24 for block in sampled)
    return Estimate(end - begin, (end - begin) * stored // plain if stored < WORTHWHILE * plain else end - begin)


def _encode(source: SafetensorsFile, name: str, number: int) -> CodedBlock:
    tensor = source.tensors[name]
    width = WIDTHS[tensor.dtype]
    return encode_block(_numbers(_matrix(source, name), Grid.of(tensor.shape), width, number), width)


def _matrix(source: SafetensorsFile, name: str) -> Bytes:
    """The bytes of a tensor's numbers as its grid has them, [rows, columns * width]."""
    tensor = source.tensors[name]
    return source.bytes_of(tensor).reshape(Grid.of(tensor.shape).rows, -1)


def _numbers(matrix: Bytes, grid: Grid, width: int, number: int) -> Bytes:
    """The bytes of a block, contiguous."""
    rows, columns = grid.place(number)
    return np.ascontiguousarray(matrix[rows, columns.start * width : columns.stop * width]).reshape(-1)


def in_order(threads: Executor, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in the order of the items, of which a bounded number is in progress."""
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(threads.submit(work, item))
            if len(pending) >= _IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


class LosslessWriter:
    """Compresses one safetensors file of a checkpoint into a folder."""

    def __init__(self, source: SafetensorsFile, folder: Path, threads: Executor) -> None:
        self.source, self._threads = source, threads
        self.target = folder / (source.path.name.removesuffix(".safetensors") + SUFFIX)
        self._part = self.target.with_name(self.target.name + ".part")
        self._journal = self.target.with_name(self.target.name + ".journal")
        self._names = sorted(source.tensors, key=lambda name: source.tensors[name].data_offsets)
        self._check_source()

    def _check_source(self) -> None:
        end = 0
        for name in self._names:
            begin, stop = self.source.tensors[name].data_offsets
            if begin != end:
                raise BadCheckpoint(f"{self.source.path.name}: the bytes before tensor {name!r} belong to no tensor")
            end = stop
            if name.endswith((CODED, REST, BLOCKS)) or name == HEADER_TENSOR:
                raise BadCheckpoint(f"{self.source.path.name}: tensor {name!r} has a name of the compressed format")
        if len(self.source.header) + end != self.source.path.stat().st_size:
            raise BadCheckpoint(f"{self.source.path.name} has bytes after its last tensor")

    def write(self, report: Report) -> FileEntry:
        """Compress the file, continuing where an earlier run has stopped, and verify it. Returns its manifest entry."""
        room = self._header_room()
        stopped = threading.Event()
        hashing = self._threads.submit(_sha256, self.source.path, stopped)
        try:
            with self._part.open("r+b" if self._part.exists() else "w+b") as out:
                done = self._write_tensors(out, room, report)
                self._write_header(out, done, room)
                to_the_drive(out, 0, room)
            digest = self._check_header(done)
            sha256 = hashing.result()
        except BadCheckpoint:
            self._part.unlink(missing_ok=True)  # nothing of it can be trusted: the next run begins again
            self._journal.unlink(missing_ok=True)
            raise
        finally:
            stopped.set()
        self._part.rename(self.target)
        self._journal.unlink(missing_ok=True)
        source = SourceFile(self.source.path.name, self.source.path.stat().st_size, sha256)
        return FileEntry(self.target.name, self.target.stat().st_size, digest, source)

    def _write_tensors(self, out: BinaryIO, room: int, report: Report) -> dict[str, Written]:
        """Write the tensors that an earlier run has not finished, and compare all of them with the source."""
        done = self._resume(out, room)
        end = max(each.end for each in done.values())
        read_back = ReadBack(self.source, out, self.target, room)
        try:
            with self._journal.open("ab") as journal:
                for name in self._names:
                    if name not in done:
                        done[name] = self._write_tensor(out, name, room + end, room)
                        end = done[name].end
                        journal.write(msgspec.json.encode(done[name]) + b"\n")
                        journal.flush()
                    read_back.add(name, done[name].entry, done[name].parts)
                    begin, stop = self.source.tensors[name].data_offsets
                    report(stop - begin, done[name].n_bytes)
            read_back.finish()
        finally:
            read_back.close()
        return done

    def _resume(self, out: BinaryIO, room: int) -> dict[str, Written]:
        """Tensors that an earlier run has finished, the source's header first; the file is cut after them."""
        done: dict[str, Written] = {}
        with suppress(FileNotFoundError):
            for line in self._journal.read_bytes().splitlines():
                try:
                    written = msgspec.json.decode(line, type=Written)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    break  # cut while it was written
                if room + written.end > os.fstat(out.fileno()).st_size:
                    break
                done[written.name] = written
        if HEADER_TENSOR not in done:
            done = {HEADER_TENSOR: self._write_source_header(out, room)}
        out.truncate(room + max(each.end for each in done.values()))
        self._journal.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in done.values()))
        return done

    def _write_source_header(self, out: BinaryIO, room: int) -> Written:
        header = self.source.header
        _write_at(out, room, header)
        _write_at(out, room + len(header), bytes(-len(header) % _PLANE_ALIGNED))
        shape = (len(header) + -len(header) % _PLANE_ALIGNED,)
        entry = TensorEntry("U8", shape, None)
        return Written(HEADER_TENSOR, entry, {HEADER_TENSOR: SafeTensor("U8", shape, (0, shape[0]))})

    def _write_tensor(self, out: BinaryIO, name: str, at: int, room: int) -> Written:
        numbers = _sampled(self.source, name)
        sampled = dict(zip(numbers, self._threads.map(lambda n: _encode(self.source, name, n), numbers), strict=True))
        estimate = _estimate(self.source, name, list(sampled.values()))
        if estimate.stored >= estimate.source:
            return self._store(out, name, at, room)
        tensor = self.source.tensors[name]
        width, grid = WIDTHS[tensor.dtype], Grid.of(tensor.shape)
        n_rest = grid.rows * grid.columns * (width - 1)
        coded_at = at + max(_PLANE_ALIGNED, n_rest + -n_rest % _PLANE_ALIGNED)  # a plane of no bytes is no tensor
        table, end, rest_end = np.empty((grid.n_blocks, 3), "<u8"), 0, 0
        blocks = in_order(
            self._threads, lambda n: sampled.pop(n, None) or _encode(self.source, name, n), range(grid.n_blocks)
        )
        for number, block in enumerate(blocks):
            _write_at(out, at + rest_end, block.rest.data)
            _write_at(out, coded_at + end, block.coded)
            rest_end, end = rest_end + block.rest.nbytes, end + len(block.coded)
            table[number] = (end, *block.checksum)
        table_bytes = table.nbytes
        n_coded = end + -(end + table_bytes) % _PLANE_ALIGNED  # so that what follows the table is aligned
        _write_at(out, at + n_rest, bytes(coded_at - at - n_rest))
        _write_at(out, coded_at + end, bytes(n_coded - end) + table.tobytes())
        begin = at - room
        middle, table_at = coded_at - room, coded_at + n_coded - room
        parts = {
            name + REST: SafeTensor("U8", (middle - begin,), (begin, middle)),
            name + CODED: SafeTensor("U8", (n_coded,), (middle, table_at)),
            name + BLOCKS: SafeTensor("U64", table.shape, (table_at, table_at + table_bytes)),
        }
        entry = TensorEntry(tensor.dtype, tensor.shape, (grid.block_rows, grid.block_columns))
        return Written(name, entry, parts)

    def _store(self, out: BinaryIO, name: str, at: int, room: int) -> Written:
        """Copy a tensor as it is."""
        tensor, digest = self.source.tensors[name], hashlib.blake2b(digest_size=16)
        raw = self.source.bytes_of(tensor)
        for start in range(0, raw.nbytes, _CHUNK_BYTES):
            chunk = raw[start : start + _CHUNK_BYTES]
            digest.update(chunk.data)
            _write_at(out, at + start, chunk.data)
        placed = SafeTensor(tensor.dtype, tensor.shape, (at - room, at - room + raw.nbytes))
        return Written(name, TensorEntry(tensor.dtype, tensor.shape, None, digest.hexdigest()), {name: placed})

    def _format(self, entries: dict[str, TensorEntry]) -> str:
        return msgspec.json.encode(FileFormat(VERSION, entries)).decode()

    def _header_room(self) -> int:
        """Bytes before the data: enough for a header in which every tensor is coded and every offset is long."""
        longest = SafeTensor("F8_E4M3", (10**15, 10**15), (10**15, 10**15))
        entries = {
            name: TensorEntry(each.dtype, each.shape, (10**9, 10**9), 32 * "0")
            for name, each in self.source.tensors.items()
        }
        parts = {name + suffix: longest for name in self._names for suffix in (REST, CODED, BLOCKS)}
        n_bytes = len(_header(parts | {HEADER_TENSOR: longest}, self._format(entries))) + 8
        if n_bytes > MAX_HEADER_BYTES:
            raise BadCheckpoint(f"{self.source.path.name} has too many tensors for one compressed file")
        return n_bytes + -n_bytes % _ALIGNED

    def _write_header(self, out: BinaryIO, done: dict[str, Written], room: int) -> None:
        entries = {name: each.entry for name, each in done.items() if name != HEADER_TENSOR}
        parts = {name: part for each in done.values() for name, part in each.parts.items()}
        header = _header(parts, self._format(entries))
        assert len(header) + 8 <= room, "a header is longer than the longest that was expected"
        _write_at(out, 0, (room - 8).to_bytes(8, "little") + header.ljust(room - 8))

    def _check_header(self, done: dict[str, Written]) -> str:
        """Read the file's header back. Returns the digest of the file, whose tensors have been compared."""
        file = LosslessFile.open(self._part)
        try:
            is_same = file.source_header[: len(self.source.header)] == self.source.header
            is_same &= file.stored.tensors == {
                name: part for each in done.values() for name, part in each.parts.items()
            }
            is_same &= file.format.tensors == {name: done[name].entry for name in self._names}
            if not is_same:
                raise BadCheckpoint(f"{self.target.name}: the header was not written as it was")
            return file.digest
        finally:
            file.close()


def _header(parts: dict[str, SafeTensor], text: str) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt", METADATA_KEY: text}}
    return msgspec.json.encode(fields | dict(sorted(parts.items(), key=lambda item: item[1].data_offsets)))


def _write_at(out: BinaryIO, offset: int, data: "bytes | memoryview") -> None:
    view = memoryview(data).cast("B")
    while len(view):
        n = os.pwrite(out.fileno(), view, offset)
        view, offset = view[n:], offset + n


def _sha256(path: Path, stopped: threading.Event) -> str:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_HASHED_BYTES))
    with path.open("rb", buffering=0) as file:
        while not stopped.is_set() and (n := file.readinto(buffer)):
            digest.update(buffer[:n])
    return digest.hexdigest()


def source_bytes(file: LosslessFile) -> Iterator[memoryview]:
    """The bytes of the source's file, in order."""
    padded = file.source_header
    header = padded[: 8 + int.from_bytes(padded[:8], "little")]
    yield memoryview(header)
    source = msgspec.json.decode(header[8:], type=dict[str, msgspec.Raw])
    source.pop("__metadata__", None)
    tensors = {name: msgspec.json.decode(raw, type=SafeTensor) for name, raw in source.items()}
    for name in sorted(tensors, key=lambda name: tensors[name].data_offsets):
        coded = file.coded.get(name)
        if coded is None:
            raw = np.asarray(file.rows_of(name)[0]).reshape(-1)
            for start in range(0, raw.nbytes, _CHUNK_BYTES):
                yield raw[start : start + _CHUNK_BYTES].data
            continue
        grid = coded.grid
        step = grid.block_rows * max(1, _CHUNK_BYTES // (grid.block_rows * grid.columns * coded.width))
        for row in range(0, grid.rows, step):
            band = coded.decode(slice(row, min(grid.rows, row + step)), slice(0, grid.columns))
            yield band.reshape(-1).data
