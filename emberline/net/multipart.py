"""Streaming parser of multipart/form-data: small fields whole, the file in chunks, bounded memory.

Strict where lenient parsers disagree about the parts of one form: lines end in CRLF, the headers of a part are short,
and the boundary is exactly the one in the request's header.
"""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from emberline.protocol.errors import BadInput, TooLarge

MAX_PARTS = 32
MAX_HEAD_BYTES = 8 << 10  # of one part
MAX_FIELD_BYTES = 64 << 10
_BOUNDARY = re.compile(r"""(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)""", re.IGNORECASE)
_DISPOSITION = re.compile(r"^form-data\s*(?:;|$)", re.IGNORECASE)
_PARAM = re.compile(r';\s*([a-z*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))', re.IGNORECASE)


class FormPart(NamedTuple):
    name: str
    filename: str | None  # None for a field


def boundary_of(content_type: str) -> bytes:
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        shown = kind.strip()[:100] or "nothing"
        raise BadInput(f"a file is uploaded as multipart/form-data, not as {shown}", param="content-type")
    found = _BOUNDARY.search(parameters)
    if found is None:
        raise BadInput("the content type names no `boundary`", param="content-type")
    return (found[1] or found[2]).encode("latin-1")


class MultipartForm:
    """Iterates over the parts: `async for part in form`; read each with `field` or `content` before the next."""

    def __init__(self, chunks: AsyncIterator[bytes], boundary: bytes) -> None:
        self._chunks = chunks
        self._stop = b"\r\n--" + boundary
        self._buffer = b"\r\n"  # so that the first boundary matches like the others
        self._in_part = False
        self._n_parts = 0

    def __aiter__(self) -> "MultipartForm":
        return self

    async def __anext__(self) -> FormPart:
        async for _ in self.content():  # skip unread content, and what precedes the first boundary
            pass
        while len(self._buffer) < 2:
            await self._more()
        if self._buffer.startswith(b"--"):
            await self._drain()
            raise StopAsyncIteration
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise BadInput(f"the form has more than {MAX_PARTS} parts")
        head = await self._head()
        self._in_part = True
        return _part(head)

    async def content(self) -> AsyncIterator[bytes]:
        """The content of the current part, in chunks."""
        if self._n_parts and not self._in_part:
            return
        while True:
            at = self._buffer.find(self._stop)
            if at >= 0:
                chunk, self._buffer = self._buffer[:at], self._buffer[at + len(self._stop) :]
                self._in_part = False
                if chunk and self._n_parts:
                    yield chunk
                return
            keep = len(self._stop) - 1
            if len(self._buffer) > keep:
                chunk, self._buffer = self._buffer[:-keep], self._buffer[-keep:]
                if self._n_parts:
                    yield chunk
            await self._more()

    async def field(self, part: FormPart) -> str:
        """The value of a field."""
        chunks: list[bytes] = []
        n_bytes = 0
        async for chunk in self.content():
            n_bytes += len(chunk)
            if n_bytes > MAX_FIELD_BYTES:
                raise TooLarge(f"the field {part.name!r} is larger than {MAX_FIELD_BYTES >> 10} KiB", param=part.name)
            chunks.append(chunk)
        try:
            return b"".join(chunks).decode()
        except UnicodeDecodeError:
            raise BadInput(f"the field {part.name!r} is not valid UTF-8", param=part.name) from None

    async def _head(self) -> str:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise BadInput(f"the headers of a part are longer than {MAX_HEAD_BYTES >> 10} KiB")
            await self._more()
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        if not head.startswith(b"\r\n"):
            raise BadInput("a boundary in the form is not followed by a line end and a part's headers")
        try:
            return head.decode()
        except UnicodeDecodeError:
            raise BadInput("the headers of a part are not valid UTF-8") from None

    async def _more(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            raise BadInput("the form ends in the middle: its last boundary is missing")
        self._buffer += chunk

    async def _drain(self) -> None:
        """Read and drop what follows the last boundary, so that the connection stays usable."""
        self._buffer = b""
        n_bytes = 0
        async for chunk in self._chunks:
            n_bytes += len(chunk)
            if n_bytes > MAX_FIELD_BYTES:
                raise TooLarge("there is too much data after the end of the form")


def _part(head: str) -> FormPart:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition" and _DISPOSITION.match(value.strip()):
            found = {key.lower(): _unquoted(quoted) or plain for key, quoted, plain in _PARAM.findall(value)}
            if found.get("name"):
                return FormPart(found["name"], found.get("filename"))
    raise BadInput("a part of the form has no name: it needs `Content-Disposition: form-data; name=…`")


def _unquoted(text: str) -> str:
    """Browsers write %22 for a quote; others escape it."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
