"""The lines of a JSONL file as it is read: one at a time, none longer than a bound."""

from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

MARK = b"\xef\xbb\xbf"  # some editors begin a file with it


class FileLine(NamedTuple):
    at: int  # from 1, as editors count
    data: bytes | None  # None: it is too long


async def lines_of(chunks: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[FileLine]:
    """The lines that are not blank. What is too long is passed over without being held."""
    at, parts, n_bytes = 1, [b""], 0
    async for chunk in chunks:
        first, *others = chunk.split(b"\n")
        n_bytes += len(first)
        parts = [*parts, first] if n_bytes <= max_bytes else []
        for piece in others:
            if line := _line(at, parts, n_bytes, max_bytes):
                yield line
            at, parts, n_bytes = at + 1, [piece], len(piece)
    if line := _line(at, parts, n_bytes, max_bytes):
        yield line


def _line(at: int, parts: list[bytes], n_bytes: int, max_bytes: int) -> FileLine | None:
    if n_bytes > max_bytes:
        return FileLine(at, None)
    data = b"".join(parts).strip()
    if at == 1:
        data = data.removeprefix(MARK)
    return FileLine(at, data) if data else None
