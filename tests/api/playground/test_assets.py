"""The playground's page and assets over HTTP: policy, caching, compression, and nothing beside the table."""

import gzip
import re

import httpx
import pytest

from emberline.api.playground import assets
from tests.api.fake_service import KEY, FakeService, client_of

MAX_COMPRESSED_BYTES = 300 << 10


async def test_page(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|style=", answer.text), "nothing inline"
    assert not re.search(r'(?:src|href)="(?:https?:)?//', answer.text), "nothing from elsewhere"


async def test_links_of_the_page_and_imports_of_modules_lead_somewhere(client: httpx.AsyncClient) -> None:
    page = (await client.get("/")).text
    links = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page)
    assert len(links) >= 3
    assert any(link.endswith("/vendor/preact.js") for link in links), "modules are preloaded"
    for link in links:
        assert (await client.get(link)).status_code == 200, link
    names = assets.load().files
    for name, asset in names.items():
        folder = name.rpartition("/")[0]
        pattern = r"url\(([^)]+)\)" if name.endswith(".css") else r'from\s*"\./([^"]+)"'
        for target in re.findall(pattern, asset.body.decode()):
            assert (f"{folder}/{target}" if folder else target) in names, (name, target)


async def test_caching(client: httpx.AsyncClient) -> None:
    path = f"/assets/{assets.load().digest}/app.js"
    answer = await client.get(path, headers={"accept-encoding": "identity"})
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    etag = {"if-none-match": answer.headers["etag"]}
    unchanged = await client.get(path, headers=etag)
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    other = await client.get("/assets/0123456789abcdef/app.js")  # a page of another version
    assert (other.status_code, other.headers["cache-control"]) == (200, "no-cache")
    page = await client.get("/")
    assert page.headers["cache-control"] == "no-cache"
    assert (await client.get("/", headers={"if-none-match": page.headers["etag"]})).status_code == 304


async def test_compression(client: httpx.AsyncClient) -> None:
    path = f"/assets/{assets.load().digest}/base.css"
    plain = await client.get(path, headers={"accept-encoding": "identity"})
    packed = await client.get(path, headers={"accept-encoding": "br, gzip"})
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == "Accept-Encoding"
    assert packed.text == plain.text
    for asset in assets.load().files.values():
        assert gzip.decompress(asset.compressed) == asset.body


def test_size() -> None:
    found = assets.load()
    n_bytes = sum(len(asset.compressed) for asset in (*found.files.values(), *found.pages.values()))
    assert n_bytes <= MAX_COMPRESSED_BYTES


@pytest.mark.parametrize(
    "name",
    [
        "",
        "app.js",
        "x/",
        "x/nope.js",
        "x/../assets.py",
        "x/%2e%2e/assets.py",
        "x/..%2fassets.py",
        "x/vendor",
        "x//app.js",
    ],
)
async def test_what_is_not_in_the_table_is_not_served(client: httpx.AsyncClient, name: str) -> None:
    assert (await client.get(f"/assets/{name}")).status_code == 404


def test_licenses_of_vendored_files() -> None:
    assert not [name for name in assets.load().files if "LICENSE" in name or name.endswith(".md")], "not served"
    folder = assets.files("emberline.api.playground").joinpath("static/vendor")
    assert "MIT" in folder.joinpath("LICENSE.preact").read_text()
    assert "Apache License" in folder.joinpath("LICENSE.htm").read_text()


async def test_page_and_assets_need_no_key(service: FakeService) -> None:
    async with client_of(service, KEY) as client:
        assert (await client.get("/")).status_code == 200
        assert (await client.get(f"/assets/{assets.load().digest}/app.js")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401
