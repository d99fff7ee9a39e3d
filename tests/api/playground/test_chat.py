"""The playground in a real browser: chat, branches, comparison, settings, code, import and export."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from emberline.protocol.events import Started, TextDelta, TextEvent, Usage
from emberline.protocol.price import Price
from emberline.protocol.request import GenerateRequest
from tests.api.fake_service import KEY, MODEL, FakeModels, agent, card, hello
from tests.api.playground.browser import (
    A_MODEL,
    FORGET,
    Stage,
    ask,
    dismiss,
    echoes,
    endless,
    expect,
    expect_drawn,
    module,
    reply,
    writes,
)
from tests.cluster_processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

# A fixed amount of work, for comparison: CPU time alone depends on the machine.
REFERENCE = "() => JSON.parse(JSON.stringify(Array.from({ length: 500_000 }, (_, n) => `${n}`))).length"
START_COST = 1.0  # of the reference; 0.3 was measured
LIGHT, DARK = "rgb(250, 248, 245)", "rgb(22, 19, 17)"


def last_question(request: GenerateRequest) -> str:
    assert request.messages is not None
    return next(message.content for message in reversed(request.messages) if message.role == "user")


def start_costs(page: "Page") -> Iterator[float]:
    """What the page's main thread computes until it is painted and knows a model, for each of several visits: CPU time
    relative to the reference's."""
    client = page.context.new_cdp_session(page)
    client.send("Performance.enable", {"timeDomain": "threadTicks"})

    def cpu_s() -> float:
        rows = client.send("Performance.getMetrics")["metrics"]
        return next(row["value"] for row in rows if row["name"] == "TaskDuration")

    for _ in range(4):
        page.reload()
        page.wait_for_selector(A_MODEL)
        page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
        start_s = cpu_s()
        page.evaluate(REFERENCE)
        yield start_s / (cpu_s() - start_s)
    client.detach()


def test_first_visit_to_first_token(stage: Stage) -> None:
    """A newcomer reads nothing: a model is chosen, the cursor is in the message, a sample is one click."""
    with stage.site() as here:
        page = here.open()
        page.wait_for_selector(".model-button:has-text('smollm2-135m-instruct')")
        expect(page.locator("#prompt")).to_be_focused()
        page.click(".samples button >> nth=0")
        assert reply(page) == "Hello!"
        assert here.service.requests[0].model == MODEL
        sent = page.evaluate("performance.getEntriesByType('resource').reduce((n, r) => n + r.encodedBodySize, 0)")
        assert sent < 300 << 10
        blocking = page.evaluate(
            """performance.getEntriesByType('resource').filter((r) => r.renderBlockingStatus === 'blocking')
              .map((r) => r.name.split('/').at(-1))"""
        )
        assert sorted(blocking) == ["base.css", "playground.css"], "the first paint waits for nothing else"
        assert any(cost < START_COST for cost in start_costs(page))


def test_reply_with_metrics_and_session(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        ask(page, "Hi")
        assert reply(page) == "Hello!"
        for text in ("TTFT", "3 out", "12 in", "8 cached"):
            expect(page.locator(".metrics")).to_contain_text(text)
        ask(page, "And again")
        expect(page.locator(".metrics")).to_have_count(2)
        first, second = here.service.requests
        assert first.session
        assert first.session == second.session
        assert [message.role for message in second.messages or ()] == ["user", "assistant", "user"]
        page.click("text=New chat")
        page.wait_for_selector(".welcome")
        ask(page, "New")
        reply(page)
        assert here.service.requests[2].session != first.session
        expect(page.locator(".message")).to_have_count(2)
        other_server = {"data": [{"id": "see/er"}, {"id": "a/b", "display_name": "A B"}]}  # names little of its models
        page.route("**/v1/models", lambda route: route.fulfill(json=other_server))
        refresh = (
            "async (path) => { const { models } = await import(path); await models.refresh(); return models.all; }"
        )
        found = page.evaluate(refresh, module(page, "models.js"))
        assert [(model["name"], model["author"], model["vision"]) for model in found] == [
            ("see/er", "", False),
            ("A B", "", False),
        ]


def test_the_wait_for_a_model_is_shown(stage: Stage) -> None:
    loaded = threading.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        await asyncio.to_thread(loaded.wait)
        async for event in hello(request):
            yield event

    class OnDisk(FakeModels):
        def state(self, model_id: str) -> str:
            return "on_disk"

    with stage.site(script) as here:
        here.service.models = OnDisk()
        page = here.open()
        ask(page, "Hi")
        expect(page.locator(".waiting .notice")).to_contain_text("loading @")
        loaded.set()
        assert reply(page) == "Hello!"


def test_the_place_in_the_queue_is_shown(stage: Stage) -> None:
    computed = threading.Event()

    async def script(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        await asyncio.to_thread(computed.wait)
        async for event in hello(request):
            yield event

    with stage.site(script) as here:
        page, here.service.ahead = here.open(), 3
        ask(page, "Hi")
        expect(page.locator(".waiting .notice")).to_have_text("waiting, 3 ahead …")
        here.service.ahead = None
        expect(page.locator(".waiting .notice")).to_have_text("running …")
        computed.set()
        assert reply(page) == "Hello!"


def test_reasoning_and_tool_calls(stage: Stage) -> None:
    with stage.site(agent) as here:
        page = here.open()
        ask(page, "Weather?")
        assert reply(page) == "Let me look."
        page.click(".reasoning summary")
        expect(page.locator(".reasoning .markdown")).to_have_text("Two towns.")
        expect(page.locator(".tool-call")).to_have_count(2)
        expect(page.locator(".tool-call pre").nth(1)).to_contain_text('"town": "Rome"')
        here.service.script = hello
        page.locator(".tool-call textarea").nth(0).fill("rain")
        page.locator(".tool-call textarea").nth(1).fill("sun")
        page.click("text=Send results")
        expect(page.locator(".metrics")).to_have_count(2)
        sent = here.service.requests[1].messages or ()
        assert [message.role for message in sent] == ["user", "assistant", "tool", "tool"]
        assert [(message.content, message.tool_call_id) for message in sent[2:]] == [
            ("rain", "call_a"),
            ("sun", "call_b"),
        ]
        assert sent[1].reasoning == "Two towns."


def test_stop_and_continue(stage: Stage) -> None:
    """Stop reaches the server, the text stays, and the reply can go on."""
    with stage.site(endless) as here:
        page = here.open()
        ask(page, "Go on and on")
        page.wait_for_selector("text=word50 ")
        page.keyboard.press("Escape")
        page.wait_for_selector(".metrics:has-text('stopped')")
        wait_until(lambda: here.service.open == 0, "the server still generates")
        text = page.text_content(".message.assistant .markdown") or ""
        here.service.script = writes("and more")
        page.click("text=Continue")
        page.wait_for_selector("text=and more")
        request = here.service.requests[1]
        assert request.continue_final
        assert (request.messages or ())[-1].role == "assistant"
        expect(page.locator(".message")).to_have_count(2)
        assert (page.text_content(".message.assistant .markdown") or "").startswith(text)


@pytest.mark.slow
def test_regenerate_edit_and_branches(stage: Stage) -> None:
    with stage.site(echoes(lambda request: f"You said {last_question(request)}.")) as here:
        page = here.open()
        ask(page, "one")
        assert reply(page) == "You said one."
        page.click("[aria-label=Regenerate]")
        page.wait_for_selector(".branches:has-text('2 / 2')")
        page.hover(".message.user")
        page.click(".message.user [aria-label='Edit as a branch']")
        page.fill(".editor textarea", "two")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("text=You said two.")
        expect(page.locator(".message.user .branches")).to_have_text("2 / 2")
        page.click(".message.user [aria-label='Previous branch']")
        page.wait_for_selector("text=You said one.")
        page.click(".message.assistant [aria-label='Previous branch']")
        page.wait_for_selector(".message.assistant .branches:has-text('1 / 2')")
        ask(page, "three")
        page.wait_for_selector("text=You said three.")
        sent = [message.content for message in here.service.requests[-1].messages or ()]
        assert sent == ["one", "You said one.", "three"]


@pytest.mark.slow
def test_compare_two_models(stage: Stage) -> None:
    script = echoes(lambda request: f"{request.model.rpartition('/')[2]} at {request.sampling.temperature}")
    with stage.site(script) as here:
        page = here.open()
        page.keyboard.press("Alt+c")
        page.click(".pane-head .model-button >> nth=1")
        page.click(".models button:has-text('tiny')")
        expect(page.locator(".pane-head .model-button").nth(1)).to_be_focused()
        page.fill("#p-temperature", "1.5")
        page.keyboard.press("Tab")
        ask(page, "Who are you?")
        expect(page.locator(".metrics")).to_have_count(2)
        replies = page.locator(".message.assistant .markdown")
        expect(replies).to_have_text(["smollm2-135m-instruct at 1.0", "tiny at 1.5"])
        assert len({request.session for request in here.service.requests}) == 2
        page.keyboard.press("Alt+c")
        expect(page.locator(".pane")).to_have_count(1)


def test_parameters_reach_the_server(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        page.fill("text=System prompt >> textarea", "Be brief.")
        for name, value in {"temperature": "0.7", "top_p": "0.5", "max_tokens": "99", "seed": "7"}.items():
            page.fill(f"#p-{name}", value)
        page.select_option("label:has-text('Reasoning') select", "low")
        ask(page, "Hi")
        reply(page)
        request = here.service.requests[0]
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.7, 0.5, 99, 7)
        assert request.reasoning.effort == "low"
        assert [(m.role, m.content) for m in request.messages or ()] == [("system", "Be brief."), ("user", "Hi")]


@pytest.mark.slow
def test_schema_and_tool_editors(stage: Stage) -> None:
    with stage.site(writes('{"name": "Ada"}')) as here:
        page = here.open()
        page.click("summary:has-text('Output format')")
        page.click("text=JSON schema")
        editor = "textarea[aria-label='JSON schema, as JSON']"
        page.fill(editor, '{"type": "objekt"}')
        expect(page.locator(".json-editor .mark.bad")).to_have_text("not valid")
        expect(page.locator(".json-editor .problem")).to_contain_text("objekt")
        page.fill("#prompt", "Not yet")
        page.press("#prompt", "Enter")
        expect(page.locator(".composer .problem")).to_contain_text("not valid")
        expect(page.locator("#prompt")).to_have_value("Not yet")
        page.fill(editor, '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}')
        expect(page.locator(".json-editor .mark.good")).to_have_text("valid")
        page.click("summary:has-text('Tools')")
        page.click("text=Insert an example")
        expect(page.locator(".json-editor .mark.good")).to_have_count(2)
        # Tools and a schema exclude each other in some models: plain JSON.
        page.get_by_role("button", name="JSON", exact=True).click()
        expect(page.locator(".json-editor")).to_have_count(1)
        ask(page, "Hi")
        reply(page)
        (request,) = here.service.requests
        assert last_question(request) == "Hi"
        assert [tool.name for tool in request.tools] == ["get_weather"]
        assert request.output is not None


def sample(page: "Page", begins: str) -> str:
    """The code that is shown, once it is the one that begins so."""
    expect(page.locator(".sample code")).to_have_text(re.compile(f"^{re.escape(begins)}"))
    return page.text_content(".sample code") or ""


@pytest.mark.slow
def test_view_code_runs(stage: Stage) -> None:
    """What the page shows as curl is the request that it would send."""
    with stage.site(echoes(lambda request: f"You said {last_question(request)}")) as here:
        page = here.open()
        page.fill("#p-temperature", "0.3")
        page.fill("#prompt", 'It\'s "quoted" $HOME `x` \\ & <b>')
        page.keyboard.press("Alt+v")
        code = sample(page, "curl ")
        if shutil.which("curl"):
            done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
            assert "[DONE]" in done.stdout
            assert last_question(here.service.requests[0]) == 'It\'s "quoted" $HOME `x` \\ & <b>'
            assert here.service.requests[0].sampling.temperature == 0.3
        page.click("dialog >> text=Python")
        compile(sample(page, "from openai import OpenAI"), "sample", "exec")
        page.click("dialog >> text=JavaScript")
        assert "await fetch(" in sample(page, "const response")
        dismiss(page, "#prompt")


@pytest.mark.slow
def test_view_code_in_python_and_javascript_runs(stage: Stage, tmp_path: Path) -> None:
    with stage.site(echoes(lambda request: f"You said {last_question(request)}")) as here:
        page = here.open()
        page.click("summary:has-text('More parameters')")
        page.fill("#p-min_p", "0.1")
        page.fill("#prompt", 'It\'s "quoted" ünïcode \\n 🔥')
        page.keyboard.press("Alt+v")
        page.click("dialog >> text=Python")
        code = sample(page, "from openai import OpenAI")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.startswith('You said It\'s "quoted" ünïcode \\n 🔥'), done.stderr
        page.click("dialog >> text=JavaScript")
        if shutil.which("node"):
            program = tmp_path / "sample.mjs"
            program.write_text(sample(page, "const response"))
            done = subprocess.run(["node", program], capture_output=True, text=True)
            assert done.stdout == 'You said It\'s "quoted" ünïcode \\n 🔥', done.stderr


def test_export_and_import(stage: Stage, tmp_path: Path) -> None:
    with stage.site(echoes(lambda request: f"You said {last_question(request)}.")) as here:
        page = here.open()
        page.fill("#p-seed", "42")
        ask(page, "one")
        reply(page)
        page.click("[aria-label=Regenerate]")
        page.wait_for_selector(".branches:has-text('2 / 2')")
        assert reply(page) == "You said one."
        with page.expect_download() as download:
            page.click("[aria-label='Export the conversation']")
        path = tmp_path / "conversation.json"
        download.value.save_as(path)
        assert len(json.loads(path.read_text())["panes"][0]["conversation"]["messages"]) == 3
        page.click("text=New chat")
        page.fill("#p-seed", "")
        page.wait_for_selector(".welcome")
        page.set_input_files("input[aria-label='Conversation file']", path)
        page.wait_for_selector("text=You said one.")
        expect(page.locator(".branches")).to_have_text("2 / 2")
        expect(page.locator("#p-seed")).to_have_value("42")
        plain = tmp_path / "messages.json"
        plain.write_text(json.dumps([{"role": "user", "content": "from elsewhere"}]))
        page.set_input_files("input[aria-label='Conversation file']", plain)
        page.wait_for_selector("text=from elsewhere")
        for text in ("{", '{"a": 1}', '[{"role": "user"}]', '{"format": "emberline.conversation", "messages": [3]}'):
            plain.write_text(text)
            page.set_input_files("input[aria-label='Conversation file']", plain)
            page.wait_for_selector(".banner")
            page.click(".banner button")
            expect(page.locator(".banner")).to_have_count(0)
        expect(page.locator("text=from elsewhere")).to_have_count(1)


@pytest.mark.slow
def test_a_reload_keeps_the_conversation(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        ask(page, "remember me")
        reply(page)
        page.reload()
        page.wait_for_selector("text=remember me")
        expect(page.locator(".message.assistant .markdown")).to_have_text("Hello!")


@pytest.mark.slow
def test_keyboard_and_screen_reader(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        page.wait_for_selector(".model-button:has-text('smollm2')")
        unnamed = page.evaluate(
            """[...document.querySelectorAll("button, input, textarea, select, a")].filter((node) =>
              !(node.getAttribute("aria-label") || node.textContent.trim() || node.labels?.length))
              .map((node) => node.outerHTML)"""
        )
        assert unnamed == []
        expect(page.locator("main")).to_have_count(1)
        expect(page.locator("[aria-live=polite]")).to_have_count(1)
        page.keyboard.press("Alt+m")
        expect(page.locator("dialog [type=search]")).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector(".model-button:has-text('tiny')")
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.press("Alt+s")
        expect(page.locator(".settings")).to_have_count(0)
        page.keyboard.type("hi")
        page.keyboard.press("Enter")
        reply(page)
        expect(page.locator("[aria-live=polite]")).to_have_text("The reply is complete.")
        page.keyboard.press("Alt+r")
        page.wait_for_selector(".branches:has-text('2 / 2')")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        page.wait_for_selector("dialog:has-text('Keyboard shortcuts')")
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
        page.keyboard.press("/")
        expect(page.locator("#prompt")).to_be_focused()


@pytest.mark.slow
def test_a_narrow_screen_in_both_themes(stage: Stage) -> None:
    with stage.site(
        writes("# Title\n\n", "```py\n" + "x" * 300 + "\n```\n\n", "| a | b |\n|---|---|\n| " + "y" * 200 + " | 2 |")
    ) as here:
        page = here.open(360, 640)
        ask(page, "Hi")
        reply(page)
        for text in ("Title", "xxx", "yyy"):
            expect_drawn(page, ".message.assistant .markdown", text)
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate("document.querySelector('.scroller').scrollWidth <= 360")
        ground = "(expected) => getComputedStyle(document.body).backgroundColor === expected"
        page.wait_for_function(ground, arg=LIGHT)
        page.emulate_media(color_scheme="dark")
        page.wait_for_function(ground, arg=DARK)
        for theme, expected in (("light", LIGHT), ("dark", DARK), ("auto", DARK)):  # auto: as the system has it
            page.click("[aria-label^='Theme']")
            page.wait_for_selector(f"[aria-label='Theme: {theme}']")
            assert page.evaluate(ground, expected), theme
        page.keyboard.press("Alt+s")
        page.wait_for_selector(".settings")
        assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.slow
def test_images_only_where_a_model_sees(stage: Stage) -> None:
    with stage.site(failures=True) as here:
        page = here.open()
        page.wait_for_selector(".model-button:has-text('smollm2')")
        expect(page.locator("input[type=file][multiple]")).to_have_count(0)
        seeing = {"object": "list", "data": [{"id": "see/er", "capabilities": {"vision": True}, "owned_by": "x"}]}
        page.route("**/v1/models", lambda route: route.fulfill(json=seeing))
        bodies: list[dict[str, object]] = []
        page.route("**/v1/chat/completions", lambda route: (bodies.append(route.request.post_data_json), route.abort()))
        page.reload()
        page.wait_for_selector(".model-button:has-text('see/er')")
        image = bytes.fromhex("89504e470d0a1a0a")
        page.set_input_files("input[type=file][multiple]", {"name": "a.png", "mimeType": "image/png", "buffer": image})
        page.wait_for_selector(".thumb img")
        page.set_input_files("input[type=file][multiple]", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"x"})
        page.wait_for_selector(".composer .problem")
        ask(page, "What is it?")
        page.wait_for_selector(".message.assistant .problem")
        content = bodies[0]["messages"][0]["content"]  # type: ignore[index]
        assert [part["type"] for part in content] == ["image_url", "text"]
        assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")


PNG = {"name": "a.png", "mimeType": "image/png", "buffer": bytes.fromhex("89504e470d0a1a0a")}
ANSWERED = ".message.assistant [title=Regenerate]"  # replies that are complete
# Drops a file on an element. Returns True if the browser leaves it to the page.
DROP = """(node, type) => {
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File(["x"], "a.file", { type }));
  const fields = { dataTransfer, bubbles: true, cancelable: true };
  return ["dragover", "drop"].map((name) => !node.dispatchEvent(new DragEvent(name, fields))).every(Boolean);
}"""


def sees_and_reads(page: "Page") -> list[list[dict[str, Any]]]:
    """Offer a model that takes images and one that takes none. Returns a list that grows by each request's messages."""
    rows = [{"id": "see/er", "capabilities": {"vision": True}}, {"id": "read/er", "capabilities": {}}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": rows}))
    sent: list[list[dict[str, Any]]] = []

    def answer(route: "Route") -> None:
        sent.append((route.request.post_data_json or {})["messages"])
        route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    page.evaluate("() => poll()")
    page.wait_for_selector(".model-button:has-text('see/er')")
    return sent


def choose(page: "Page", model: str, pane: int = 0) -> None:
    page.click(f"main .model-button >> nth={pane}")
    page.click(f".models button:has-text('{model}')")
    expect(page.locator("dialog")).to_have_count(0)


def test_an_image_is_sent_or_the_page_says_why_not(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        sent = sees_and_reads(page)
        problem, thumbs, prompt = (page.locator(it) for it in (".composer .problem", ".thumb", "#prompt"))
        page.set_input_files("input[type=file][multiple]", PNG)
        expect(thumbs).to_have_count(1)
        choose(page, "read/er")
        expect(problem).to_have_text("read/er takes no images. Remove the image, or choose a model that takes images.")
        page.press("#prompt", "Enter")  # an image alone
        page.fill("#prompt", "What is it?")
        page.press("#prompt", "Enter")
        expect(prompt).to_have_value("What is it?")
        expect(thumbs).to_have_count(1)
        assert sent == []
        choose(page, "see/er")
        expect(problem).to_have_count(0)
        page.keyboard.press("Alt+c")
        expect(page.locator(".pane")).to_have_count(2)
        choose(page, "read/er", pane=1)
        expect(problem).to_contain_text("Right: read/er takes no images. Remove")
        page.press("#prompt", "Enter")
        expect(prompt).to_have_value("What is it?")
        assert sent == []
        choose(page, "see/er", pane=1)
        page.press("#prompt", "Enter")
        expect(prompt).to_have_value("")
        expect(thumbs).to_have_count(0)
        expect(page.locator(ANSWERED)).to_have_count(2)
        assert len(sent) == 2
        for (message,) in sent:
            image, text = message["content"]
            assert image["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
            assert text == {"type": "text", "text": "What is it?"}


def test_files_are_attached_wherever_they_are_dropped_and_again_after_removal(stage: Stage) -> None:
    with stage.site() as here:
        page = here.open()
        sent = sees_and_reads(page)
        thumbs, problem = page.locator(".thumb"), page.locator(".composer .problem")
        page.set_input_files("input[type=file][multiple]", PNG)
        page.click("[aria-label='Remove image 1']")
        expect(thumbs).to_have_count(0)
        left = page.eval_on_selector("input[type=file][multiple]", "(input) => input.files.length")
        assert left == 0, "choosing the same file again would change nothing"
        assert page.eval_on_selector(".transcript", DROP, "image/png")
        expect(thumbs).to_have_count(1)
        page.press("#prompt", "Enter")  # an image alone
        expect(thumbs).to_have_count(0)
        expect(page.locator(ANSWERED)).to_have_count(1)
        assert [part["type"] for part in sent[0][0]["content"]] == ["image_url"]
        choose(page, "read/er")
        assert page.eval_on_selector(".composer", DROP, "image/png")
        expect(problem).to_contain_text("read/er takes no images.")
        assert page.eval_on_selector("h1", DROP, "text/plain")
        expect(problem).to_contain_text("a.file is not an image")


def test_view_code_has_the_attached_images(stage: Stage) -> None:
    """The page shows the beginning of an image and copies all of it, as a command that any shell can take."""
    with stage.site() as here:
        page = here.open()
        sees_and_reads(page)
        page.evaluate("() => { navigator.clipboard.writeText = async (text) => { window.copied = text; }; }")
        page.set_input_files("input[type=file][multiple]", PNG | {"buffer": PNG["buffer"] + bytes(150_000)})
        expect(page.locator(".thumb")).to_have_count(1)
        page.fill("#prompt", "It's what?")
        page.keyboard.press("Alt+v")
        for name in ("JavaScript", "Python", "curl"):
            page.click(f"dialog .segments >> text={name}")
            begin = {"curl": "curl ", "Python": "from ", "JavaScript": "const "}[name]
            shown = sample(page, begin)
            assert "data:image/png;base64,iVBOR" in shown
            assert "It's what?" in shown
            assert len(shown) < 3000, name
            page.click(".sample .copy")
            page.wait_for_function("(begin) => window.copied?.startsWith(begin)", arg=begin)
            assert len(page.evaluate("window.copied")) > 200_000, name
        if shutil.which("bash"):
            code = "curl() { cat; }\n" + page.evaluate("window.copied")
            done = subprocess.run(["bash"], input=code, capture_output=True, text=True, timeout=60, check=True)
            (message,) = json.loads(done.stdout)["messages"]
            assert len(message["content"][0]["image_url"]["url"]) > 200_000
            assert message["content"][1]["text"] == "It's what?"


async def _waits(request: GenerateRequest) -> AsyncIterator[TextEvent]:
    yield Started(Usage(prompt_tokens=1, completion_tokens=1))
    yield TextDelta(0, "begun")
    await asyncio.sleep(3600)


def test_leaving_the_page_ends_the_request(stage: Stage) -> None:
    with stage.site(_waits) as here:
        page = here.open()
        ask(page, "Hi")
        page.wait_for_selector("text=begun")
        assert here.service.open == 1
        page.evaluate(FORGET)
        page.goto("about:blank")
        wait_until(lambda: here.service.open == 0, "the server still generates")


@pytest.mark.slow
def test_models_that_appear_later(stage: Stage) -> None:
    cards = [card("@cf/a/first", "a")]
    with stage.site() as here:
        here.service.models = FakeModels(cards)
        page = here.open()
        page.keyboard.press("Alt+m")
        expect(page.locator(".models bdi b")).to_have_text(["first"])
        cards.append(card("@cf/a/second", "a"))
        page.evaluate("() => poll()")
        expect(page.locator(".models bdi b")).to_have_text(["first", "second"])


@pytest.mark.slow
def test_cost_and_states_of_models(stage: Stage) -> None:
    """At 1 and 4 per million tokens, 12 in (8 cached, at a tenth) and 3 out."""
    price = Price(input=1_000_000, output=4_000_000, cached_input=100_000)
    cards = [
        card("@cf/a/waiting", "a"),
        card("@cf/a/ready", "a", price=price),
        card("@cf/a/embeds", "a", task="Text Embeddings"),
    ]
    states = {"@cf/a/waiting": "on_disk", "@cf/a/ready": "loaded", "@cf/a/embeds": "loaded"}

    class Models(FakeModels):
        def state(self, model_id: str) -> str:
            return states[model_id]

    with stage.site() as here:
        here.service.models = Models(cards)
        page = here.open()
        page.wait_for_selector(".model-button:has-text('ready')")  # the first that is loaded and chats
        ask(page, "Hi")
        reply(page)
        expect(page.locator(".metrics")).to_contain_text("$0.0000168")
        page.keyboard.press("Alt+m")
        expect(page.locator(".models .state")).to_have_text(["on disk", "loaded", "loaded"])
        expect(page.locator(".models li > button:disabled")).to_have_text(re.compile("^embeds"))


def test_models_are_loaded_and_unloaded_from_the_list(stage: Stage) -> None:
    states = {"@cf/a/waiting": "on_disk", "@cf/a/ready": "loaded", "@cf/a/provider": ""}

    class Models(FakeModels):
        def state(self, model_id: str) -> str:
            return states[model_id]

    with stage.site() as here:
        here.service.models = Models([card(name, "a") for name in states])
        page = here.open()
        page.keyboard.press("Alt+m")
        expect(page.locator(".models .action")).to_have_text(["Load", "Unload"])
        states["@cf/a/waiting"] = "loaded"
        page.click(".models .action:has-text('Load')")
        expect(page.locator(".models .action")).to_have_text(["Unload", "Unload"])
        states["@cf/a/ready"] = "on_disk"
        page.locator(".models .action").nth(1).click()
        expect(page.locator(".models .action")).to_have_text(["Unload", "Load"])
        assert here.service.loads == [("@cf/a/waiting", "load"), ("@cf/a/ready", "unload")]
        page.route("**/api/models/available", lambda route: route.fulfill(json={"data": [], "can_load": False}))
        with page.expect_response("**/api/models/available"):
            page.keyboard.press("Escape")
            page.keyboard.press("Alt+m")
        expect(page.locator(".models .action")).to_have_count(0)  # an account's key, which the server would refuse


def test_models_are_pulled_with_progress(stage: Stage) -> None:
    names = {"tiny:1b": True, "vast:900b": False}
    offers = [
        {"name": name, "id": f"@hf/acme/{name}", "aliases": [], "bytes": 2 << 30, "fits": fits, "here": False}
        | {"quantization": "Q4_K_M", "license": "mit", "capabilities": ["tools"], "context_window": 4096}
        for name, fits in names.items()
    ]
    with stage.site() as here:
        page = here.open()
        page.route("**/api/models/available", lambda route: route.fulfill(json={"data": offers}))
        downloads: list[Route] = []  # answered when the test has seen that the page waits
        page.route("**/api/pull", lambda route: downloads.append(route))
        page.keyboard.press("Alt+m")
        expect(page.locator(".offers b")).to_have_text(["tiny:1b"])  # what fits, until one searches
        page.fill("[aria-label='Search models']", "vast")
        expect(page.locator(".offers .line").first).to_contain_text("does not fit this machine")
        page.fill("[aria-label='Search models']", "")
        page.click(".offers .action")
        expect(page.locator(".offers progress")).to_have_attribute("aria-label", "Pulling tiny:1b")
        assert downloads[0].request.post_data_json == {"model": "tiny:1b"}
        line = {"status": "pulling", "total": 2 << 30, "completed": 1 << 30}
        show = (
            "async ([path, line]) => { const { models } = await import(path);"
            " models.pulling.set('tiny:1b', line); models.changed(); }"
        )
        page.evaluate(show, [module(page, "models.js"), line])
        expect(page.locator(".offers .pull")).to_have_text("1.0 GiB of 2.0 GiB")
        downloads[0].fulfill(body='{"status": "success"}\n', content_type="application/x-ndjson")
        expect(page.locator(".offers .pull")).to_have_count(0)


def test_enter_in_the_search_for_a_model_chooses_the_first(stage: Stage) -> None:
    with stage.site() as site:
        page = site.open()
        page.click(".model-button")
        page.fill("[aria-label='Search models']", "tiny")
        page.press("[aria-label='Search models']", "Enter")
        expect(page.locator("dialog")).to_have_count(0)
        expect(page.locator(".model-button")).to_contain_text("tiny")


def test_invalid_tools_stop_every_kind_of_request(stage: Stage) -> None:
    with stage.site() as site:
        page = site.open()
        ask(page, "Hello")
        reply(page)
        page.click("summary:has-text('Tools')")
        page.fill("[aria-label='Tools, as JSON']", "[{")
        n_sent = len(site.service.requests)
        page.click("[title=Regenerate]")
        expect(page.locator(".composer .problem")).to_contain_text("The tools are not valid")
        page.fill("#prompt", "Again")
        page.press("#prompt", "Enter")
        expect(page.locator("#prompt")).to_have_value("Again")
        assert len(site.service.requests) == n_sent
        page.fill("[aria-label='Tools, as JSON']", "")
        expect(page.locator(".composer .problem")).to_have_count(0)
        page.press("#prompt", "Enter")
        expect(page.locator("#prompt")).to_have_value("")
        reply(page)
        assert len(site.service.requests) == n_sent + 1


def test_a_narrow_page_of_a_signed_in_user_fits(stage: Stage) -> None:
    with stage.site(key=KEY, failures=True) as site:
        page = site.open(width=390, height=844)
        page.fill("dialog.sign-in input", KEY)
        page.press("dialog.sign-in input", "Enter")
        page.wait_for_selector(A_MODEL)
        inside = "(it) => it.scrollWidth <= it.clientWidth"
        for part in ("html", ".top", ".toolbar"):
            assert page.eval_on_selector(part, inside), part
        edges = page.eval_on_selector_all(
            ".top *, .toolbar *", "(all) => all.map((it) => it.getBoundingClientRect().right)"
        )
        assert max(edges) <= 390
