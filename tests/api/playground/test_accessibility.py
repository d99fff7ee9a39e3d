"""No page has an accessibility fault that axe finds: both themes, wide and narrow, dialogs open."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from tests.api.playground.browser import Stage, ask, reply, writes

if TYPE_CHECKING:
    from playwright.sync_api import Page

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
REPLY = "# A tower\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint(1)\n```\n"


OFFER = {"name": "tiny:1b", "id": "@hf/acme/tiny", "aliases": [], "bytes": 2 << 30, "fits": True, "here": False} | {
    "quantization": "Q4_K_M",
    "license": "mit",
    "capabilities": ["tools"],
}


def axe() -> str:
    """Text of axe's script, from the package that `make pages` installs."""
    if (spec := find_spec("axe_playwright_python")) is None or not spec.submodule_search_locations:
        pytest.skip("needs axe-playwright-python: `make pages` installs it")
    return next(Path(spec.submodule_search_locations[0]).rglob("axe.min.js")).read_text()


def faults(page: "Page") -> list[str]:
    found = page.evaluate(f"axe.run({{ runOnly: {RULES} }})")["violations"]
    return [f"{rule['id']}: {[node['target'] for node in rule['nodes']]}" for rule in found]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")])
def test_axe_finds_nothing(stage: Stage, width: int, theme: Literal["light", "dark"]) -> None:
    with stage.site(writes(REPLY), failures=True) as here:
        script = axe()
        page = here.open(width, 800, theme)
        page.route("**/api/models/available", lambda route: route.fulfill(json={"data": [OFFER]}))
        page.evaluate(script)
        found = {"welcome": faults(page)}
        ask(page, "What is a lighthouse?")
        reply(page)
        for name, shortcut in (("chat", None), ("chats", "h"), ("models", "m"), ("code", "v"), ("settings", "s")):
            if shortcut:
                page.keyboard.press(f"Alt+{shortcut}")
            found[name] = faults(page)
            if shortcut and shortcut != "s":
                page.keyboard.press("Escape")
                page.wait_for_selector("dialog", state="detached")
        page.goto(f"{here.stage.url}/operations")
        page.wait_for_selector("main")
        page.evaluate(script)
        found["operations"] = faults(page)
        assert {name: each for name, each in found.items() if each} == {}
