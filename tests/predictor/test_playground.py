"""The playground's form of a pushed model, in a real browser on a real server."""

import asyncio
import base64
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from emberline.predictor.versions import PredictorVersions
from emberline.supervisor.sandbox.protections import find_protections
from tests.api.playground.browser import expect, launch
from tests.predictor.test_serving import push, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here"),
]

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
LOADED = """() => document.querySelector('.output img')?.naturalWidth > 0
    && document.querySelector('.output audio').duration > 0"""


def use_form(page: "Page", url: str, picture: Path) -> None:
    faults: list[str] = []
    page.on("console", lambda message: message.type == "error" and faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(url)
    form = page.locator("form[aria-label=Inputs]")
    expect(form.locator(".field")).to_have_count(5)
    expect(page.locator("#prompt")).to_have_count(0)
    page.click("button:has-text('Run')")
    expect(page.locator(".output img")).to_have_count(0)  # the browser asks for the image that is needed
    page.set_input_files("#i-image", picture)
    expect(form.locator(".media img")).to_have_count(1)
    page.select_option("#i-style", label="striped")
    page.fill("#i-hertz", "880")
    page.fill("#i-note", "<b>bold</b>")
    page.click("summary:has-text('Code')")
    expect(form.locator("pre.code")).to_contain_text('"style": "striped"')
    page.click("button:has-text('Run')")
    page.wait_for_function(LOADED)
    output = page.locator(".output")
    assert page.evaluate("document.querySelector('.output audio').duration") == 0.5
    expect(output.locator(".plain").first).to_have_text("<b>bold</b>")
    expect(output.locator(".metrics")).to_contain_text("pixels 1536")
    page.evaluate("document.querySelector('#i-hertz').removeAttribute('max')")
    page.fill("#i-hertz", "9000")
    page.click("button:has-text('Run')")
    expect(output.locator(".problem")).to_contain_text("`hertz` must be at most 4000")
    assert [fault for fault in faults if "Failed to load resource" not in fault] == []


async def test_a_form_is_drawn_from_the_schema(versions: PredictorVersions, tmp_path: Path) -> None:
    push(versions, tmp_path, "studio", "studio")
    picture = tmp_path / "pixel.png"
    picture.write_bytes(PIXEL)

    def browse(url: str) -> None:
        with launch() as browser:
            use_form(browser.new_page(), url, picture)

    async with serving(versions, tmp_path, ["studio"]) as server:
        await asyncio.to_thread(browse, str(server.root.base_url))
