"""Saved chats in a real browser: kept where the user chose, found again after a reload, renamed, deleted."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.playground.browser import A_MODEL, Stage, ask, dismiss, expect, reply, writes
from tests.api.server_process import make_home, serving

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ".chats li > button:first-child bdi"


def open_chats(page: "Page", place: str) -> None:
    page.keyboard.press("Alt+h")
    page.click(f"dialog .segments button:has-text('{place}')")


def keep_chats(page: "Page", place: str) -> None:
    """Save two chats, find them after a reload, rename one, continue it, delete both."""
    open_chats(page, place)
    expect(page.locator("dialog")).to_contain_text("No chat is saved yet")
    dismiss(page, "#prompt")
    ask(page, "What is a lighthouse?")
    reply(page)
    page.click("button:has-text('New chat')")
    ask(page, "<b>Tea</b> or coffee?")
    reply(page)
    page.keyboard.press("Alt+h")
    expect(page.locator(NAMES)).to_have_count(2)
    page.evaluate("sessionStorage.clear()")
    page.reload()
    page.wait_for_selector(A_MODEL)
    page.keyboard.press("Alt+h")
    expect(page.locator(NAMES)).to_have_count(2)
    page.fill("dialog input[type=search]", "light IS")
    expect(page.locator(NAMES)).to_have_text(["What is a lighthouse?"])
    page.click("[aria-label='Rename What is a lighthouse?']")
    page.fill("[aria-label=Title]", "Towers")
    page.keyboard.press("Enter")
    page.fill("dialog input[type=search]", "towers")
    expect(page.locator(NAMES)).to_have_text(["Towers"])
    page.click(NAMES)
    expect(page.locator(".message.user")).to_contain_text("What is a lighthouse?")
    ask(page, "And a buoy?")
    reply(page)
    page.keyboard.press("Alt+h")
    expect(page.locator(NAMES)).to_have_count(2)
    expect(page.locator(NAMES).first).to_have_text("Towers")
    page.click("[aria-label='Delete Towers']")
    page.click("[aria-label='Delete?'] button:has-text('Delete')")
    expect(page.locator(NAMES)).to_have_text(["<b>Tea</b> or coffee?"])
    page.click("button:has-text('Delete all')")
    page.click("[aria-label='Delete every saved chat?'] button:has-text('Delete')")
    expect(page.locator("dialog")).to_contain_text("No chat is saved yet")


def test_chats_in_the_browser(stage: Stage) -> None:
    with stage.site(writes("A tower with a light.")) as here:
        keep_chats(here.open(), "In this browser")


@pytest.mark.slow
def test_chats_on_a_server(stage: Stage, smollm2: Path, tmp_path: Path) -> None:
    browser = stage.page.context.browser
    assert browser is not None
    with serving(make_home(smollm2, tmp_path), "say=count,itl_ms=1", 4) as server:
        page = Stage(browser, stage.wire, server.url).page
        page.goto(server.url)
        page.wait_for_selector(A_MODEL)
        page.fill("#p-max_tokens", "3")
        page.click("#prompt")
        keep_chats(page, "On the server")
        page.close()


def test_a_chat_stays_in_its_tab_unless_the_user_chooses_otherwise(stage: Stage) -> None:
    with stage.site(writes("Hi.")) as here:
        page = here.open()
        ask(page, "Hello")
        reply(page)
        page.click("button:has-text('New chat')")
        ask(page, "Kept")
        reply(page)
        open_chats(page, "In this browser")
        expect(page.locator(NAMES)).to_have_text(["Kept"])
        page.click("dialog .segments button:has-text('Only in this tab')")
        expect(page.locator(NAMES)).to_have_count(0)
        page.click("dialog .segments button:has-text('In this browser')")
        page.click("button:has-text('Delete all')")
        page.click("[aria-label='Delete every saved chat?'] button:has-text('Delete')")
        expect(page.locator(NAMES)).to_have_count(0)


def test_a_server_that_cannot_keep_chats_says_so(stage: Stage) -> None:
    with stage.site(writes("Hi."), failures=True) as here:
        page = here.open()
        open_chats(page, "On the server")
        expect(page.locator("dialog .problem")).to_contain_text("without a store")
