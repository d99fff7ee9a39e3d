"""What a model, a server or a network may do to the page: markup that wants to run, floods, endless replies, lost
connections, revoked keys."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from emberline.protocol.errors import Overloaded
from emberline.protocol.events import (
    ChoiceDone,
    Completed,
    ReasoningDelta,
    Started,
    TextDelta,
    TextEvent,
    ToolCallDelta,
    ToolCallStarted,
    Usage,
)
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import KEY, FakeModels, app_of, card
from tests.api.playground.browser import Stage, ask, dismiss, endless, expect, module, reply, writes
from tests.cluster_processes import wait_until

PAYLOADS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<img src='http://evil.test/pixel.png'>",
    "<svg onload=alert(1)><a xlink:href='javascript:alert(1)'>x</a></svg>",
    "<iframe src='javascript:alert(1)'></iframe><object data='data:text/html,<script>alert(1)</script>'></object>",
    "<style>@import 'http://evil.test/x.css'; body { background: url(http://evil.test/y) }</style>",
    "<base href='http://evil.test/'><meta http-equiv=refresh content='0;url=http://evil.test/'>",
    "<link rel=prefetch href=http://evil.test/z><link rel=stylesheet href=http://evil.test/s.css>",
    "<form action='http://evil.test/'><button autofocus onfocus=alert(1)>x</button></form>",
    "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
    "![pixel](http://evil.test/p.png) ![x](javascript:alert(1)) ![d](data:image/svg+xml,<svg/onload=alert(1)>)",
    "[click](javascript:alert(1)) [c](  JaVaScRiPt:alert(1)) [d](data:text/html,<script>alert(1)</script>)",
    "[v](vbscript:x) [blob](blob:http://127.0.0.1/x) [view](view-source:http://evil.test)",
    "[a](java\tscript:alert(1)) [b](&#106;avascript:alert(1)) [c](//evil.test) [d](/v1/models) [e](file:///etc/passwd)",
    "[x](https://ok.test/\"onmouseover=alert(1)) <https://ok.test/'onclick=alert(1)>",
    "https://ok.test/<script>alert(1)</script> https://ok.test/&quot;onload=alert(1)",
    "[ref]: javascript:alert(1)\n[ref] <javascript:alert(1)>",
    "```html\n<script>alert(1)</script>\n```\n```<img/onerror=alert(1)>\nx\n```",
    "| <script>alert(1)</script> | b |\n|---|---|\n| <img src=x onerror=alert(1)> | [x](javascript:alert(1)) |",
    "# <img src=x onerror=alert(1)>\n> <script>alert(1)</script>\n- <svg/onload=alert(1)>\n1. `<script>`",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.test\x07link\x1b]8;;\x07 \x07 \x00 \x9b2J",
    "\u202egnp.exe\u202c \u2066hidden\u2069 \ufeff zero",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)} <%= alert(1) %>",
]


async def hostile(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    everything = "\n\n".join(PAYLOADS)
    yield Started(Usage(prompt_tokens=1, completion_tokens=1))
    for text in PAYLOADS:
        yield ReasoningDelta(0, text + "\n\n")
    for start in range(0, len(everything), 5):
        yield TextDelta(0, everything[start : start + 5])
    for index, text in enumerate(PAYLOADS):
        yield ToolCallStarted(0, index, f"call_{index}", text)
        yield ToolCallDelta(0, index, json.dumps({"value": text}))
    yield ChoiceDone(0, "tool_calls")
    yield Completed(Usage(prompt_tokens=1, completion_tokens=9))


def test_markup_in_output_names_and_arguments_is_text(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["@cf/x/<img/src=x/onerror=alert(1)>", "@cf/y/\x1b[31m\u202eevil", "@cf/<script>alert(1)</script>/z"]
    cards = [card(name, "<b>me</b>") for name in names]
    monkeypatch.setattr(FakeModels, "cards", lambda self: cards)
    monkeypatch.setattr(FakeModels, "find", lambda self, name, account=None, caller="": cards[0])
    with stage.site(hostile) as here:
        page = here.open()
        page.wait_for_selector(".model-button:has-text('onerror')")
        page.keyboard.press("Alt+m")
        expect(page.locator(".models li")).to_have_count(len(names))
        dismiss(page, "#prompt")
        ask(page, PAYLOADS[1])
        reply(page)
        page.click(".reasoning summary")
        expect(page.locator(".reasoning .markdown")).to_contain_text("alert(1)")
        expect(page.locator(".message.assistant > .markdown")).to_contain_text("alert(1)")
        expect(page.locator(".tool-call")).to_have_count(len(PAYLOADS))
        found = page.evaluate(
            """() => ({
              elements: document.querySelectorAll("script:not([src]), iframe, object, base, form[action]").length,
              inside: document.querySelectorAll(".transcript :is(img, svg:not(.icon), style, link, meta)").length,
              handlers: [...document.querySelectorAll(".transcript *")].filter((node) => [...node.attributes].some(
                (a) => a.name.startsWith("on") || (/^\\s*javascript:/i.test(a.value) && a.name !== "title"))).length,
              links: [...document.querySelectorAll(".transcript a")].map((a) => [a.protocol, a.rel, a.target, a.host]),
              text: document.querySelector(".transcript").textContent,
            })"""
        )
        assert (found["elements"], found["inside"], found["handlers"]) == (0, 0, 0)
        assert found["links"]
        for protocol, rel, target, host in found["links"]:
            assert protocol in ("http:", "https:")
            assert ("noopener" in rel, "noreferrer" in rel, target) == (True, True, "_blank")
            assert host in ("ok.test", "evil.test")
        for hidden in "\x1b\x00\x07\u202e\u2066":
            assert hidden not in found["text"]
        page.keyboard.press("Alt+v")
        page.wait_for_selector(".sample code")


def test_an_imported_conversation_is_not_trusted(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "evil.json"
    rows: list[dict[str, Any]] = []
    for index, text in enumerate(PAYLOADS):
        role = "assistant" if index % 2 else "user"
        row = {"id": str(index), "parent": str(index - 1) if index else None, "role": role, "content": text}
        rows.append(
            row | {"model": text, "error": text, "images": ["http://evil.test/x.png", "javascript:alert(1)", text]}
        )
    path.write_text(json.dumps({"format": "emberline.conversation", "version": 1, "messages": rows}))
    with stage.site() as here:
        page = here.open()
        page.set_input_files("input[aria-label='Conversation file']", path)
        expect(page.locator(".message")).to_have_count(len(PAYLOADS))
        expect(page.locator(".transcript img")).to_have_count(0)
        plain = tmp_path / "plain.json"
        plain.write_text('{"__proto__": {"polluted": 1}, "format": "emberline.workspace", "panes": []}')
        page.set_input_files("input[aria-label='Conversation file']", plain)
        page.wait_for_selector(".banner")
        assert page.evaluate("() => ({}).polluted === undefined")


# How far the transcript is from its end, in pixels.
BELOW = """() => {
  const scroller = document.querySelector(".scroller");
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
}"""
AT_END = f"() => ({BELOW})() < 100"
N_WORDS = "() => document.querySelector('.message.assistant .markdown').textContent.split(/\\s+/).length"


LONG = [f"Sentence {n} of a **long** reply with `code` and [a link](https://ok.test/{n}). " for n in range(2600)]


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([text + ("\n\n" if n % 5 == 0 else "") for n, text in enumerate(LONG)], marks=pytest.mark.slow),
        LONG,  # 200 KB in one line
        ["```python\n", *(f"value_{n} = call({n})  # comment\n" for n in range(6000)), "```"],
    ],
    ids=["paragraphs", "one-paragraph", "code"],
)
def test_a_reply_of_200_kb(stage: Stage, pieces: list[str]) -> None:
    with stage.site(writes(*pieces)) as here:
        page = here.open()
        ask(page, "Go")
        page.wait_for_selector(".message.assistant .block > *")
        page.keyboard.type("meanwhile")  # the page takes input while it streams
        page.wait_for_selector(".message.assistant .metrics", timeout=120_000)
        text = page.evaluate("() => document.querySelector('.message.assistant .markdown').textContent")
        assert len(text) > 120_000
        expect(page.locator("#prompt")).to_have_value("meanwhile")
        page.wait_for_function(AT_END)


@pytest.mark.slow
def test_no_task_of_a_long_reply_takes_50_ms(stage: Stage) -> None:
    """CPU time of each task of the page's main thread while 10,000 tokens arrive: a busy machine does not count."""
    words = [f"word{n} " if n % 12 else f"word{n}.\n\n" for n in range(10_000)]
    with stage.site(writes(*words)) as here:
        page = here.open()
        browser = page.context.browser
        assert browser is not None
        browser.start_tracing(page=page, categories=["toplevel"])
        ask(page, "Go")
        page.wait_for_selector(".message.assistant .metrics", timeout=120_000)
        events = json.loads(browser.stop_tracing())["traceEvents"]
        main = {(row["pid"], row["tid"]) for row in events if row.get("args", {}).get("name") == "CrRendererMain"}
        tasks = [row for row in events if (row["pid"], row["tid"]) in main and row["name"].endswith("RunTask")]
        assert len(tasks) > 100
        assert max(row.get("tdur", 0) for row in tasks) < 50_000


@pytest.mark.slow
def test_a_model_that_never_stops(stage: Stage) -> None:
    with stage.site(endless) as here:
        page = here.open()
        ask(page, "Go")
        page.wait_for_selector("text=word400 ")
        page.keyboard.type("still here")
        page.wait_for_function(AT_END)
        page.mouse.move(400, 400)
        page.mouse.wheel(0, -3000)
        page.wait_for_function(f"() => !({AT_END})()")
        n_words = page.evaluate(N_WORDS)
        page.wait_for_function(f"(n) => ({N_WORDS})() > n", arg=n_words + 400)
        assert page.evaluate(BELOW) > 100, "a reader who scrolled up is not pulled down"
        page.click("[aria-label=Stop]")
        page.wait_for_selector(".metrics:has-text('stopped')")
        wait_until(lambda: here.service.open == 0, "the server still generates")
        expect(page.locator("#prompt")).to_have_value("still here")


@pytest.mark.slow
def test_a_message_that_is_sent_is_shown_with_its_reply(stage: Stage) -> None:
    """Wherever the reader was, and though the reply is there before the scroll event."""
    with stage.site(writes(*(f"Paragraph {n}.\n\n" for n in range(60)))) as here:
        page = here.open()
        ask(page, "Go")
        reply(page)
        page.wait_for_function(AT_END)
        page.mouse.move(400, 400)
        page.mouse.wheel(0, -3000)
        page.wait_for_function(f"() => !({AT_END})()")
        page.evaluate("() => addEventListener('scroll', (event) => event.stopImmediatePropagation(), true)")
        ask(page, "Again")
        expect(page.locator(".metrics")).to_have_count(2)
        page.wait_for_function(AT_END)


@pytest.mark.slow
def test_a_lost_connection(stage: Stage) -> None:
    with stage.site(endless, failures=True) as here:
        page = here.open()

        def lose() -> None:
            page.wait_for_selector("text=word30 ")
            stage.wire.cuts = True
            page.wait_for_selector(".message.assistant .problem:has-text('connection was lost')")
            stage.wire.cuts = False
            expect(page.locator(".message.assistant .markdown")).to_contain_text("word30 ")
            wait_until(lambda: here.service.open == 0, "the server still generates")

        ask(page, "Go")
        lose()
        here.service.script = writes("the rest.")
        page.click("text=Continue")
        page.wait_for_selector("text=the rest.")
        expect(page.locator(".message.assistant .markdown")).to_contain_text("word30 ")
        assert here.service.requests[1].continue_final
        here.service.script = endless
        page.click("[aria-label=Regenerate]")
        page.wait_for_selector(".branches:has-text('2 / 2')")
        lose()
        here.service.script = writes("all of it.")
        page.click("text=Retry")
        page.wait_for_selector(".branches:has-text('3 / 3')")
        assert reply(page) == "all of it."


def test_errors_of_the_server_are_shown(stage: Stage) -> None:
    async def overloaded(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        raise Overloaded("too many requests are waiting", retry_after_s=7)
        yield

    async def fails_late(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        yield Started(Usage(prompt_tokens=1, completion_tokens=1))
        yield TextDelta(0, "partial")
        raise Overloaded("the engine is gone")

    with stage.site(overloaded, failures=True) as here:
        page = here.open()
        ask(page, "Go")
        page.wait_for_selector(".problem:has-text('too many requests are waiting')")
        expect(page.locator(".message .problem")).to_contain_text("Try again in 7 s.")
        here.service.script = fails_late
        page.click("text=Retry")
        page.wait_for_selector(".problem:has-text('the engine is gone')")
        expect(page.locator(".message.assistant .markdown")).to_have_text("partial")


def test_sign_in_and_a_revoked_key(stage: Stage) -> None:
    with stage.site(key=KEY, failures=True) as here:
        page = here.open()
        page.wait_for_selector("dialog:has-text('API key')")
        for _ in range(3):
            page.keyboard.press("Escape")  # there is nothing behind it
        page.fill("input[type=password]", "wrong-key")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=does not accept this key")
        page.fill("input[type=password]", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector(".model-button:has-text('smollm2')")
        ask(page, "Hi")
        assert reply(page) == "Hello!"
        assert page.evaluate("() => JSON.stringify(localStorage).length") == 2, "nothing is kept beyond the tab"
        page.keyboard.press("Alt+v")
        expect(page.locator(".sample code")).to_contain_text("$EMBERLINE_API_KEY")
        assert KEY not in page.content()
        dismiss(page, "#prompt")
        page.reload()
        page.wait_for_selector(".model-button:has-text('smollm2')")
        stage.wire.app = app_of(here.service, "another-key-than-before")  # revoked while the page is open
        ask(page, "Are you there?")
        page.wait_for_selector("dialog:has-text('no longer accepts this key')")
        page.evaluate("() => poll()")
        expect(page.locator("dialog")).to_contain_text("no longer accepts this key")
        assert page.evaluate("() => sessionStorage.getItem('emberline.key')") is None
        stage.wire.app = app_of(here.service, KEY)
        page.fill("input[type=password]", KEY)
        page.uncheck("text=Keep it until this tab is closed")
        page.keyboard.press("Enter")
        page.click("text=Retry")
        assert reply(page) == "Hello!"
        assert page.evaluate("() => sessionStorage.getItem('emberline.key')") is None
        page.click("text=Sign out")
        page.wait_for_selector("dialog:has-text('API key')")


def test_a_late_refusal_of_another_key(stage: Stage) -> None:
    with stage.site(key=KEY, failures=True) as here:
        page = here.open()
        found = page.evaluate(
            """async ([path, key]) => {
              const { getJson, session } = await import(path);
              const refused = [];
              for (const [before, after] of [[null, key], ["an-earlier-key", key]]) {
                session.set({ key: before });
                const late = getJson("/v1/models").catch((error) => refused.push(error.status));
                session.signIn(after, false);
                await late;
              }
              return [refused, session.key, session.needed];
            }""",
            [module(page, "api.js"), KEY],
        )
        assert found == [[401, 401], KEY, False]


def memory(stage: Stage) -> dict[str, float]:
    client = stage.page.context.new_cdp_session(stage.page)
    client.send("HeapProfiler.collectGarbage")
    client.send("Performance.enable")
    found = {row["name"]: row["value"] for row in client.send("Performance.getMetrics")["metrics"]}
    client.detach()
    return found


@pytest.mark.slow
def test_a_page_left_open_does_not_grow(stage: Stage) -> None:
    text = [f"Paragraph {n} with *words* and `code`.\n\n```js\nlet x = {n};\n```\n\n" for n in range(60)]
    limits = {"Nodes": 200, "JSEventListeners": 50, "JSHeapUsedSize": 1 << 20}
    with stage.site(writes(*text)) as here:
        page = here.open()

        def talk(n_replies: int) -> None:
            for _ in range(n_replies):
                ask(page, "Go")
                reply(page)
                page.keyboard.press("Alt+n")
                page.locator(".welcome").wait_for()  # wait_for_selector would hold the element

        def grown() -> list[str]:
            found = memory(stage)
            return [
                f"{name}: {found[name] - first[name]}" for name in limits if found[name] - first[name] >= limits[name]
            ]

        talk(3)
        first = memory(stage)
        talk(8)
        wait_until(lambda: not grown(), "the page keeps what it no longer shows")  # timers end, garbage is collected
