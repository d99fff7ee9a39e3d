"""Pages and their assets (ES modules, styles): read and compressed once, served from a fixed table.

Assets lie under `/assets/{digest}/`, where the digest covers all of them: modules import each other by relative paths,
and browsers cache every file forever, because another version has another address.
"""

import gzip
import hashlib
import re
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import NamedTuple

from emberline import __version__
from emberline.api.http.errors import HeaderList
from emberline.api.http.exchange import HttpExchange, Reply
from emberline.protocol.errors import NotFound

_TYPES = {
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Nothing is inline and nothing comes from elsewhere. Trusted Types turn `innerHTML` and the like into errors.
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    b"media-src data: blob:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"
)
_COMMON: HeaderList = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"vary", b"Accept-Encoding"),
]
_PAGE: HeaderList = [(b"content-security-policy", POLICY), (b"cross-origin-opener-policy", b"same-origin")]
_PRELOAD = re.compile(rb'<script type="module" src="/{assets}/([^"]+)"')
_IMPORT = re.compile(rb'from ?"\./([^"]+)"')
_FOREVER = b"public, max-age=31536000, immutable"
_REVALIDATE = b"no-cache"


class Asset(NamedTuple):
    content_type: bytes
    body: bytes
    compressed: bytes
    etag: bytes

    @classmethod
    def of(cls, content_type: bytes, body: bytes) -> "Asset":
        etag = b'"' + hashlib.sha256(body).hexdigest()[:20].encode() + b'"'
        return cls(content_type, body, gzip.compress(body, 9, mtime=0), etag)


class Assets(NamedTuple):
    digest: str
    files: dict[str, Asset]  # by path below /assets/{digest}/
    pages: dict[str, Asset]  # by file name; their links name the digest

    def reply(self, call: HttpExchange, asset: Asset, cache_control: bytes, headers: HeaderList) -> Reply:
        headers = [*_COMMON, (b"cache-control", cache_control), (b"etag", asset.etag), *headers]
        if call.headers.get("if-none-match") == asset.etag.decode():
            return Reply(304, b"", asset.content_type, headers)
        if "gzip" in call.headers.get("accept-encoding", ""):
            return Reply(200, asset.compressed, asset.content_type, [*headers, (b"content-encoding", b"gzip")])
        return Reply(200, asset.body, asset.content_type, headers)


@cache
def load() -> Assets:
    """All files of `static/`: what is not in this table cannot be served."""
    found = dict(_read(files("emberline.api.playground").joinpath("static")))
    bodies = {name: body for name, body in found.items() if _suffix(name) in _TYPES}
    digest = hashlib.sha256()
    for name, body in sorted(bodies.items()):
        digest.update(b"%d:%b%d:" % (len(name), name.encode(), len(body)) + body)
    version = digest.hexdigest()[:16]
    pages = {
        name: _PRELOAD.sub(lambda script: _preloads(script, bodies), body)
        .replace(b"{assets}", f"assets/{version}".encode())
        .replace(b"{version}", __version__.encode())
        for name, body in found.items()
        if name.endswith(".html")
    }
    return Assets(
        version,
        {name: Asset.of(_TYPES[_suffix(name)], body) for name, body in bodies.items()},
        {name: Asset.of(b"text/html; charset=utf-8", body) for name, body in pages.items()},
    )


def _preloads(script: re.Match[bytes], bodies: dict[str, bytes]) -> bytes:
    """Links to all modules behind a page's script, so that a browser asks for them at once, not level by level."""
    found = {script[1].decode()}
    for _ in bodies:  # as many levels as there can be
        found |= {_resolve(name, target) for name in found for target in _IMPORT.findall(bodies[name])}
    links = (b'<link rel="modulepreload" href="/{assets}/%b">\n' % name.encode() for name in sorted(found))
    return b"".join(links) + script[0]


def _resolve(name: str, target: bytes) -> str:
    folder = name[: name.rfind("/") + 1]
    return folder + target.decode()


def _read(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        found += _read(entry, f"{name}/") if entry.is_dir() else [(name, entry.read_bytes())]
    return found


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


async def playground(call: HttpExchange) -> Reply:
    return _page(call, "playground.html")


async def operations(call: HttpExchange) -> Reply:
    """Serve the operator's pages. They read the admin API, with the key that the operator gives them."""
    return _page(call, "operations.html")


def _page(call: HttpExchange, name: str) -> Reply:
    """A page of `static/`, with the content security policy of all pages."""
    assets = load()
    return assets.reply(call, assets.pages[name], _REVALIDATE, _PAGE)


async def asset(call: HttpExchange) -> Reply:
    """An asset of this version may be cached forever; one asked for under another digest only until asked again."""
    assets = load()
    digest, _, name = call.path_param.partition("/")
    found = assets.files.get(name)
    if found is None:
        raise NotFound("no such asset")
    return assets.reply(call, found, _FOREVER if digest == assets.digest else _REVALIDATE, [])
