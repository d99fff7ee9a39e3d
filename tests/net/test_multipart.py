"""Multipart forms in any chunking, and invalid ones."""

from collections.abc import AsyncIterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.api.batches.job_format import FileLine, file_lines
from emberline.net.multipart import MAX_FIELD_BYTES, MAX_PARTS, MultipartForm, boundary_of
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge

Parts = list[tuple[str, str | None, bytes]]


async def cut(body: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(body), size):
        yield body[at : at + size]


async def read(body: bytes, boundary: bytes = b"B", size: int = 7) -> Parts:
    form = MultipartForm(cut(body, size), boundary)
    found: Parts = []
    async for part in form:
        found.append((part.name, part.filename, b"".join([piece async for piece in form.content()])))
    return found


def written(parts: Parts, boundary: bytes = b"B") -> bytes:
    body = b""
    for name, filename, content in parts:
        body += b"--" + boundary + b'\r\nContent-Disposition: form-data; name="' + name.encode() + b'"'
        body += b'; filename="' + filename.encode() + b'"' if filename is not None else b""
        body += b"\r\n\r\n" + content + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


# Contents that look like boundaries, and pieces of them.
contents = st.lists(st.sampled_from([b"\r\n", b"--B", b"--", b"-", b"\r", b"\n", b"x", b"B"]), max_size=12).map(
    b"".join
)


@given(st.lists(contents.filter(lambda c: b"\r\n--B" not in b"\r\n" + c), max_size=4), st.integers(1, 40))
async def test_any_chunking(held: list[bytes], size: int) -> None:
    parts: Parts = [(f"p{i}", "f" if i % 2 else None, content) for i, content in enumerate(held)]
    assert await read(written(parts), size=size) == parts


async def test_httpx_form() -> None:
    request = httpx.Request(
        "POST", "http://x", data={"purpose": "batch"}, files={"file": ('a"b.jsonl', b"{}\n", "text/plain")}
    )
    body = b"".join([chunk async for chunk in request.stream])  # type: ignore[union-attr]
    boundary = boundary_of(request.headers["content-type"])
    assert await read(body, boundary, 5) == [("purpose", None, b"batch"), ("file", 'a"b.jsonl', b"{}\n")]


async def test_preamble_and_epilogue_are_skipped() -> None:
    whole = b"hello\r\n" + written([("a", None, b"1")]) + b"bye"
    assert await read(whole) == [("a", None, b"1")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing here",
        b"--B\r\n",
        b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nvalue',
        b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\nvalue\r\n--B',
        b"--B\r\n\r\nvalue\r\n--B--",
        b"--B\r\nContent-Disposition: form-data\r\n\r\nvalue\r\n--B--",
        b'--B\r\nContent-Disposition: attachment; name="a"\r\n\r\nvalue\r\n--B--',
        b'--Bx\r\nContent-Disposition: form-data; name="a"\r\n\r\nvalue\r\n--B--',
        b"--B\r\n\xff: \xff\r\n\r\nvalue\r\n--B--",
        b"--B\r\n" + b"x" * 20_000,
        written([(f"p{i}", None, b"") for i in range(MAX_PARTS + 1)]),
    ],
)
async def test_bad_forms(body: bytes) -> None:
    with pytest.raises(BadInput):
        await read(body, size=1000)


async def test_a_field_is_small() -> None:
    form = MultipartForm(cut(written([("a", None, b"x" * (MAX_FIELD_BYTES + 1))]), 4096), b"B")
    part = await anext(form)
    with pytest.raises(TooLarge):
        await form.field(part)


@pytest.mark.parametrize("kind", ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=B"])
def test_not_a_form(kind: str) -> None:
    with pytest.raises(EmberlineError):
        boundary_of(kind)


@given(st.lists(st.binary(max_size=9).filter(lambda line: b"\n" not in line), max_size=9), st.integers(1, 12))
async def test_lines(lines: list[bytes], size: int) -> None:
    whole = b"\n".join(lines)
    found = [line async for line in file_lines(cut(whole, size), 6)]
    expected = [(at, line if len(line) <= 6 else None) for at, line in enumerate(lines, 1)]
    if lines and expected[0][1] is not None:  # a byte order mark at the start of a file is no content
        expected[0] = (1, expected[0][1].removeprefix(b"\xef\xbb\xbf"))
    assert found == [FileLine(at, line and line.strip()) for at, line in expected if line is None or line.strip()]
