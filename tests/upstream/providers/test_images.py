"""Images through every API to every provider: the provider gets the same picture in its own form."""

import base64
import json
import re
from typing import Any

import pytest

from emberline.images.decoders import MEMORY_BYTES, ImageDecoders
from emberline.images.request_images import RequestImages
from emberline.images.sources import ImageLimits, ImageSources
from emberline.net.egress_policy import EgressPolicy
from emberline.protocol.errors import NotFound
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import Launcher
from tests.images.files import encoded, picture
from tests.net.test_http_fetch import body, site
from tests.upstream.providers.conftest import SAYS, Opener, StartProvider, configured

FILE = encoded(picture(6, 4))
PNG = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{PNG}"
MODELS = {"openai": "openai/gpt-test", "anthropic": "anthropic/claude-opus-5", "gemini": "gemini/gemini-3-pro"}
TEXT = "What is this?"

Json = dict[str, Any]


def chat(model: str) -> tuple[str, Json]:
    content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": URL}}]
    return "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": content}]}


def responses(model: str) -> tuple[str, Json]:
    content = [{"type": "input_text", "text": TEXT}, {"type": "input_image", "image_url": URL}]
    return "/v1/responses", {"model": model, "input": [{"role": "user", "content": content}]}


def responses_tool(model: str) -> tuple[str, Json]:
    call = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URL}]}
    return "/v1/responses", {"model": model, "input": [{"role": "user", "content": TEXT}, call, result]}


def messages(model: str) -> tuple[str, Json]:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    content = [{"type": "text", "text": TEXT}, {"type": "image", "source": source}]
    return "/v1/messages", {"model": model, "max_tokens": 9, "messages": [{"role": "user", "content": content}]}


def messages_tool(model: str) -> tuple[str, Json]:
    source = {"type": "base64", "media_type": "image/png", "data": PNG}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    turns = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    return "/v1/messages", {"model": model, "max_tokens": 9, "messages": turns}


def run(model: str) -> tuple[str, Json]:
    return f"/client/v4/accounts/local/ai/run/{model}", {"prompt": TEXT, "image": list(FILE)}


def ollama(model: str) -> tuple[str, Json]:
    return "/api/chat", {"model": model, "messages": [{"role": "user", "content": TEXT, "images": [PNG]}]}


APIS = (chat, responses, responses_tool, messages, messages_tool, run, ollama)


def images_in(sent: Any) -> list[str]:
    """Base64 of all images in a provider's body, whatever its form."""
    text = json.dumps(sent)
    return [PNG] * text.count(PNG)


@pytest.fixture
def images() -> RequestImages:
    """Images may be fetched from loopback."""
    decoders = ImageDecoders(Launcher(Confinement(memory_bytes=MEMORY_BYTES)).start, 1)
    return RequestImages(ImageSources(EgressPolicy(("127.0.0.0/8",)), ImageLimits()), decoders)


@pytest.mark.parametrize("kind", MODELS)
async def test_an_image_of_any_api_reaches_any_provider(
    gateway: Opener, provider_server: StartProvider, images: RequestImages, kind: str
) -> None:
    server = await provider_server(kind, text="A picture.")
    made = await gateway(configured(kind, server), images=images)
    for write in APIS:
        path, given = write(MODELS[kind])
        answer = await made.post(path, given)
        assert answer.status_code == 200, f"{write.__name__}: {answer.text}"
        assert images_in(server.requests[-1]) == [PNG], write.__name__
        assert TEXT in json.dumps(server.requests[-1]), write.__name__


@pytest.mark.parametrize("kind", ["anthropic", "gemini"])
async def test_a_url_is_the_providers_to_fetch_or_ours(
    gateway: Opener, provider_server: StartProvider, images: RequestImages, kind: str
) -> None:
    """Anthropic fetches images; to Gemini goes the image itself."""
    server = await provider_server(kind, text="A picture.")
    made = await gateway(configured(kind, server), images=images)
    async with site(body(FILE)) as found:
        content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": found.url()}}]
        given = {"model": MODELS[kind], "messages": [{"role": "user", "content": content}]}
        answer = await made.post("/v1/chat/completions", given)
        assert answer.status_code == 200, answer.text
        assert len(found.heads) == (kind == "gemini")
        assert (found.url() in json.dumps(server.requests[-1])) == (kind != "gemini")
        assert images_in(server.requests[-1]) == ([PNG] if kind == "gemini" else [])


CHATS = ("/v1/chat/completions", "/v1/local/default/compat/chat/completions")


@pytest.mark.parametrize("kind", ["openai", "gemini"])
async def test_a_server_at_a_url_of_ones_own_gets_the_image_and_no_url(
    gateway: Opener, provider_server: StartProvider, images: RequestImages, kind: str
) -> None:
    server = await provider_server(kind, text="A picture.")
    made = await gateway(configured(kind, server), images=images, with_gateways=True)
    async with site(body(FILE)) as found:
        for path, url in zip(CHATS, ({"url": found.url(), "detail": "low"}, "HTTP" + found.url()[4:]), strict=True):
            pictures = [{"type": "image_url", "image_url": given} for given in ({"url": URL}, url)]
            content = [{"type": "text", "text": TEXT}, *pictures]
            turns = [{"role": "user", "content": content}, *SAYS]
            answer = await made.post(path, {"model": MODELS[kind], "messages": turns})
            assert answer.status_code == 200, answer.text
            sent = json.dumps(server.requests[-1])
            assert (images_in(sent), str(found.port) in sent) == ([PNG, PNG], False)
            if kind == "openai":
                inlined = {"url": URL, "detail": "low"} if isinstance(url, dict) else URL
                content[2] = {"type": "image_url", "image_url": inlined}
                assert server.requests[-1]["messages"] == turns
        assert len(found.heads) == 2


async def test_a_url_that_may_not_be_fetched_is_refused_with_its_image(
    gateway: Opener, provider_server: StartProvider, images: RequestImages
) -> None:
    server = await provider_server("openai")
    made = await gateway(configured("openai", server), images=images, with_gateways=True)
    named = "image 2 of the request (`messages[0].content[2]`) cannot be used: "
    for url, reason in (
        ("https://10.0.0.1/a.png", "10.0.0.1"),
        ("http://169.254.169.254/latest", "169.254.169.254"),
        ("file:///etc/passwd", "https:// URL"),
        ("file-id:file-0123", "https:// URL"),
    ):
        pictures = [{"type": "image_url", "image_url": {"url": given}} for given in (URL, url)]
        content = [{"type": "text", "text": TEXT}, *pictures]
        for path in CHATS:
            given = {"model": MODELS["openai"], "messages": [{"role": "user", "content": content}]}
            answer = await made.post(path, given)
            assert answer.status_code == 400, answer.text
            (message,) = re.findall(r'"message":"([^"]*)"', answer.text)
            assert named in message
            assert reason in message.partition(named)[2]
    assert server.requests == []


class Uploads:
    """The files of accounts: one, of the account "local"."""

    async def read(self, account: str, file_id: str, max_bytes: int) -> bytes:
        if (account, file_id) == ("local", "file-0123"):
            return FILE
        raise NotFound(f"no file {file_id}")


def image(source: Json) -> Json:
    return {"type": "image", "source": source}


async def test_files_of_the_account_and_urls_reach_a_server_with_anthropics_api_as_images(
    gateway: Opener, provider_server: StartProvider, images: RequestImages
) -> None:
    """Anthropic's own files and URLs are Anthropic's to read; a server of the operator's fetches nothing."""
    server = await provider_server("anthropic")
    images.sources.files = Uploads()
    made = await gateway(configured("anthropic", server), images=images)
    inside = image({"type": "base64", "media_type": "image/png", "data": PNG})
    ours = image({"type": "file", "file_id": "file-0123"}) | {"cache_control": {"type": "ephemeral"}}
    said = {"type": "text", "text": TEXT}
    theirs = [image({"type": "file", "file_id": "file_0123"}), image({"type": "url", "url": "https://a.example/b"})]

    def body_with(*blocks: Json) -> Json:
        used = {"type": "tool_use", "id": "t", "name": "shot", "input": {"content": [ours]}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [blocks[-1]]}
        nested = {"type": "document", "source": {"type": "content", "content": [blocks[-1]]}}
        turns = [("user", [*blocks, nested]), ("assistant", [used]), ("user", [result])]
        messages = [{"role": role, "content": content} for role, content in turns]
        return {"model": MODELS["anthropic"], "max_tokens": 9, "messages": messages}

    answer = await made.post("/v1/messages", body_with(*theirs, ours))
    assert answer.status_code == 200, answer.text
    shown = inside | {"cache_control": ours["cache_control"]}
    assert server.requests[-1]["messages"] == body_with(*theirs, shown)["messages"]

    missing = await made.post("/v1/messages", body_with(inside, said, image({"type": "file", "file_id": "file-9"})))
    assert (missing.status_code, "image 2 of the request" in missing.text) == (404, True)
    document = {"type": "document", "source": ours["source"]}
    refused = await made.post("/v1/messages", body_with(inside, document))
    assert (refused.status_code, "`messages[0].content[1]`" in refused.text) == (400, True)

    stored = {"name": "anthropic", "key": server.key, "url": server.url}
    added = await made.post("/api/providers", stored)
    assert added.status_code == 200, added.text
    async with site(body(FILE)) as found:
        linked = image({"type": "url", "url": found.url()})
        answer = await made.post("/v1/messages", body_with(inside, linked))
        assert answer.status_code == 200, answer.text
        assert server.requests[-1]["messages"] == body_with(inside, inside)["messages"]
        document = {"type": "document", "source": linked["source"]}
        refused = await made.post("/v1/messages", body_with(document))
        assert (refused.status_code, "`messages[0].content[0]`" in refused.text) == (400, True)
    assert len(server.requests) == 2
