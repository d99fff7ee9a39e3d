"""A real browser (Chromium, driven by Playwright) on a server whose replies are scripted.

Tests that need it are skipped where Chromium or Playwright is missing; `make pages` installs both.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pytest

from emberline.net.http_server import ASGIApp, Message, Receive, Scope, Send
from emberline.protocol.events import ChoiceDone, Completed, Started, TextDelta, TextEvent, Usage
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import FakeService, Script, app_of, hello
from tests.api.loopback import on_loopback

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, LocatorAssertions, Page

PATIENCE_MS = 60_000  # machines that run tests are busy
CHROMIUM = os.environ.get("EMBERLINE_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def launch() -> Iterator["Browser"]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: `make pages` installs it")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: `make pages` installs it from the system's packages")
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=3 * PATIENCE_MS
        )
        try:
            yield browser
        finally:
            browser.close()


def expect(locator: "Locator") -> "LocatorAssertions":
    """Playwright's assertions, which wait until they hold. They read `textContent`: `innerText` is empty until the
    browser has drawn what `content-visibility` lets it put off."""
    from playwright.sync_api import expect

    return expect(locator)


# The page asks for the models again every 15 s; here `poll()` does it, when a test says so.
POLL_BY_HAND = "window.setInterval = (poll) => { window.poll = poll; return 1; }"
# What the page has begun to load or to run until the next frame is seen before it is left.
DRAW_A_FRAME = "() => new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))"
# A page that is left keeps its conversation for a reload.
FORGET = "() => { sessionStorage.clear(); localStorage.clear(); Storage.prototype.setItem = () => {}; }"
A_MODEL = ".model-button:not(:has-text('No model'))"


class Wire:
    """Between the server and the app: tests replace the app while pages are open, or cut its connections."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.cuts = False  # connections are dropped at the next thing that they send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_cut(message: Message) -> None:
            if self.cuts:
                raise ConnectionResetError("cut by the test")
            await send(message)

        await self.app(scope, receive, send_or_cut)


class Stage:
    """One server and one page of a real browser for all tests: opening one takes a second."""

    def __init__(self, browser: "Browser", wire: Wire, url: str) -> None:
        self.wire, self.url = wire, url
        self.faults: list[str] = []  # script errors, policy violations, dialogs, requests to elsewhere
        self.page = browser.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.add_init_script(POLL_BY_HAND)
        self.page.on("console", lambda message: message.type == "error" and self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("popup", lambda popup: self.faults.append(f"popup: {popup.url}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)

    def _dialog(self, dialog: Any) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:", "about:")):
            self.faults.append(f"request: {request.url}")

    @contextmanager
    def site(self, script: Script = hello, key: str | None = None, failures: bool = False) -> Iterator["Site"]:
        """`failures`: requests may fail; everything else that goes to the console as an error is a fault."""
        service = FakeService(script)
        self.wire.app, self.wire.cuts = app_of(service, key), False
        self.faults.clear()
        try:
            yield Site(self, service)
        finally:
            self.page.unroute_all()
            if self.page.url != "about:blank":
                self.page.evaluate(DRAW_A_FRAME)
                self.page.evaluate(FORGET)
                self.page.goto("about:blank")
        assert [fault for fault in self.faults if not (failures and "Failed to load resource" in fault)] == []


class Site(NamedTuple):
    stage: Stage
    service: FakeService

    def open(self, width: int = 1280, height: int = 800, theme: Literal["light", "dark"] = "light") -> "Page":
        """A first visit: nothing is stored. Returns when there is a model to talk to, or a key is asked for."""
        page = self.stage.page
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(color_scheme=theme)
        page.goto(self.stage.url)
        page.wait_for_selector(f"{A_MODEL}, dialog.sign-in")
        return page


@contextmanager
def open_stage() -> Iterator[Stage]:
    wire = Wire(app_of(FakeService()))
    with launch() as browser, on_loopback(wire) as server:
        yield Stage(browser, wire, server.url)


def ask(page: "Page", text: str) -> None:
    """Sends a message, once the reply before it is complete."""
    expect(page.locator(".composer [aria-label=Send]")).to_be_attached()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    expect(page.locator("#prompt")).to_have_value("")


def reply(page: "Page") -> str:
    """The text of the last reply, once it is complete."""
    page.locator(".message.assistant:last-child .metrics").wait_for()
    return page.locator(".message.assistant .markdown").last.text_content() or ""


def expect_drawn(page: "Page", selector: str, text: str) -> None:
    """Waits until the browser has laid out the element with this text, not only put it into the document."""
    page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)", arg=[selector, text]
    )


def module(page: "Page", name: str) -> str:
    """The address of one of the page's modules, to import it."""
    script = page.get_attribute("script[type=module]", "src")
    assert script is not None
    return f"{script.rpartition('/')[0]}/{name}"


def dismiss(page: "Page", focused: str) -> None:
    """Closes a dialog with Escape, and waits until the focus is back where it was."""
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    expect(page.locator(focused)).to_be_focused()


def writes(*pieces: str) -> Script:
    """A script that replies with these pieces."""

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=12, completion_tokens=1, cached_by_tier={"device": 8}))
        for piece in pieces:
            yield TextDelta(0, piece)
            await asyncio.sleep(0)
        yield ChoiceDone(0, "stop")
        yield Completed(Usage(prompt_tokens=12, completion_tokens=len(pieces), cached_by_tier={"device": 8}))

    return script


def echoes(of: Callable[[GenerateRequest], str]) -> Script:
    """A script that replies with a text made from the request."""

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        async for event in writes(of(request))(request):
            yield event

    return script


async def endless(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    """A model that never stops."""
    yield Started(Usage(prompt_tokens=12, completion_tokens=1))
    n = 0
    while True:
        n += 1
        yield TextDelta(0, f"word{n} " if n % 40 else f"word{n}\n\n")
        await asyncio.sleep(0.0005)
