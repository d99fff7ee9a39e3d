"""The file of an image that a request names: inside a data: URL, behind an https: URL, or among the account's files."""

import binascii
import re
from typing import Protocol

import msgspec

from emberline.net.egress_policy import EgressPolicy
from emberline.net.http_fetch import FetchLimits, fetch
from emberline.protocol.errors import BadInput, NoSuchFile, NotFound, TooLarge, Unsupported
from emberline.protocol.sizes import format_limit

FILE_SCHEME = "file-id:"  # of an image that is a file of the account, which it uploaded before
_DATA_URL = re.compile(r"data:([^,;]{0,100})((?:;[^,;]{0,100}){0,8}),", re.IGNORECASE)
_ACCEPT = "image/png,image/jpeg,image/webp,image/gif"
_MAGIC = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"GIF8", "image/gif"), (b"RIFF", "image/webp"))


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the images of one request."""

    n_images: int = 100
    n_bytes: int = 20 << 20  # of one file
    n_total_bytes: int = 64 << 20  # of all files
    n_pixels: int = 50_000_000  # of one image
    n_total_pixels: int = 400_000_000  # of all images
    fetch_s: float = 10.0  # for one URL, redirects included
    fetches: bool = True  # False: images behind URLs are refused


class StoredFiles(Protocol):
    """The uploaded files of accounts."""

    async def read(self, account: str, file_id: str, max_bytes: int) -> bytes:
        """Content of a file. Raises NotFound, or TooLarge if it has more bytes."""


class ImageSources:
    """Reads the files of images."""

    def __init__(self, egress: EgressPolicy, limits: ImageLimits, files: StoredFiles | None = None) -> None:
        self.limits = limits
        self.files = files  # None: this process has no store
        self._egress = egress

    def needs_io(self, url: str) -> bool:
        """True unless the file is in the URL itself."""
        return _scheme(url) != "data"

    async def read(self, url: str, account: str, accept: str = _ACCEPT) -> bytes:
        """Read a file that is not in its URL. Raises an error that says what is wrong, without naming the image."""
        scheme, limits = _scheme(url), self.limits
        if scheme == "file-id":
            return await self._stored(url.removeprefix(FILE_SCHEME), account)
        if scheme not in ("http", "https"):
            raise BadInput("it is neither a data: URL in base64 nor an https: URL")
        if not limits.fetches:
            raise Unsupported("this server fetches no files: send it as a data: URL")
        return await fetch(url, self._egress, FetchLimits(limits.n_bytes, limits.fetch_s), accept)

    async def _stored(self, file_id: str, account: str) -> bytes:
        if self.files is None:
            raise Unsupported("this server keeps no files: send the image as a data: URL")
        try:
            return await self.files.read(account, file_id, self.limits.n_bytes)
        except NotFound:
            raise NoSuchFile(f"there is no file {file_id[:100]!r}: it was deleted, or has expired") from None
        except TooLarge:
            raise too_large(self.limits.n_bytes) from None

    def decode(self, url: str) -> bytes:
        """The file in a data: URL. Raises BadInput, or TooLarge."""
        found = _DATA_URL.match(url[:1024])
        if found is None or not found[2].lower().endswith(";base64"):
            raise BadInput("it is neither a data: URL in base64 nor an https: URL")
        if (len(url) - found.end()) // 4 * 3 > self.limits.n_bytes + 3:
            raise too_large(self.limits.n_bytes)
        text = url[found.end() :]
        if any(space in text for space in " \r\n\t"):
            text = "".join(text.split())
        try:
            data = binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
        except ValueError:  # also binascii.Error
            raise BadInput("its base64 cannot be decoded") from None
        if len(data) > self.limits.n_bytes:
            raise too_large(self.limits.n_bytes)
        return data


def too_large(n_bytes: int) -> TooLarge:
    return TooLarge(f"its file is larger than {format_limit(n_bytes)}")


def data_url(data: bytes) -> str:
    """The file as a data: URL, whose type is the one that the file's first bytes tell."""
    kind = next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)
    if kind is None:
        raise BadInput("it is no PNG, JPEG, WebP or GIF file")
    return f"data:{kind};base64,{binascii.b2a_base64(data, newline=False).decode()}"


def _scheme(url: str) -> str:
    return url[:16].partition(":")[0].lower()
