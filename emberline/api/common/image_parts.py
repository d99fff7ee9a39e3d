"""Images in the bodies of requests, as parts of canonical messages. Their files are read once a model wants them."""

import binascii
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from emberline.images.sources import FILE_SCHEME
from emberline.protocol.errors import BadInput
from emberline.protocol.request import ContentPart, Marks

Detail = Literal["auto", "low", "high", "original"]
FileId = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_ARRAY_BYTES = 8 << 20  # of an image that comes as a list of numbers, which take ten times as much
_SCHEMES = ("https://", "http://", "data:image/")
_KINDS = {"iVBOR": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}  # by how their base64 begins


def image_from_url(
    url: str | None, field: str, detail: Detail | None = None, marks: Marks | None = None
) -> ContentPart:
    """An image inside a data: URL, or behind an https: URL. Raises BadInput for any other URL."""
    if not url or not url[:12].lower().startswith(_SCHEMES):
        problem = "must be an https:// URL, or the image itself as data:image/png;base64,…"
        raise BadInput(f"`{field}` {problem}", param=field)
    return ContentPart("image", url, marks=marks or {}, detail=detail or "")


def image_from_base64(data: str, field: str, marks: Marks | None = None) -> ContentPart:
    """An image as bare base64, or as a data: URL. Its first bytes tell what it is."""
    if data[:5].lower() == "data:":
        return image_from_url(data, field, marks=marks)
    kind = next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), None)
    if kind is None or not data.isascii():
        raise BadInput(f"`{field}` must be a PNG, JPEG, GIF or WebP image in base64", param=field)
    return ContentPart("image", f"data:image/{kind};base64,{data}", marks=marks or {})


def image_from_file(file_id: str, detail: Detail | None = None, marks: Marks | None = None) -> ContentPart:
    """An image that the account has uploaded before."""
    return ContentPart("image", FILE_SCHEME + file_id, marks=marks or {}, detail=detail or "")


def image_from_array(given: msgspec.Raw, field: str) -> ContentPart:
    """Workers AI's form of an image: base64, or a list of the file's bytes as numbers."""
    raw = bytes(given)
    if len(raw) > 4 * MAX_ARRAY_BYTES:
        raise BadInput(f"`{field}` is too long: send the image in base64", param=field)
    try:
        found = msgspec.json.decode(raw, type=str | list[Annotated[int, Meta(ge=0, le=255)]])
    except msgspec.DecodeError:
        raise BadInput(f"`{field}` must be an image: base64, or a list of its bytes", param=field) from None
    text = found if isinstance(found, str) else binascii.b2a_base64(bytes(found), newline=False).decode()
    return image_from_base64(text, field)
