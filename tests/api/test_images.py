"""Images in the bodies of every API: the same parts of the canonical request, whichever client has sent them."""

import base64
from typing import Any

import httpx
import pytest

from emberline.images.sources import FILE_SCHEME
from emberline.protocol.events import ChoiceDone, TextDelta, Usage
from emberline.protocol.request import ContentPart
from tests.api.fake_service import MODEL, FakeService, says
from tests.images.files import encoded, picture

FILE = encoded(picture(6, 4))
BASE64 = base64.b64encode(FILE).decode()
URL = f"data:image/png;base64,{BASE64}"
REMOTE = "https://example.org/a.png"
TEXT, IMAGE = ContentPart("text", "What is this?"), ContentPart("image", URL)
FETCHED, STORED = ContentPart("image", REMOTE), ContentPart("image", f"{FILE_SCHEME}file-abc")

Json = dict[str, Any]


async def parts_of(client: httpx.AsyncClient, service: FakeService, path: str, body: Json) -> tuple[ContentPart, ...]:
    """The parts of the last message that reaches the service."""
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    messages = service.requests[-1].messages
    assert messages is not None
    return messages[-1].parts


def chat(*content: Json) -> Json:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(content)}]}


def text(kind: str = "text") -> Json:
    return {"type": kind, "text": "What is this?"}


async def test_openai_chat(client: httpx.AsyncClient, service: FakeService) -> None:
    path = "/v1/chat/completions"
    given = chat({"type": "image_url", "image_url": {"url": URL}}, text())
    assert await parts_of(client, service, path, given) == (IMAGE, TEXT)
    given = chat(text(), {"type": "image_url", "image_url": {"url": REMOTE, "detail": "high"}})
    assert await parts_of(client, service, path, given) == (TEXT, ContentPart("image", REMOTE, detail="high"))
    bad = await client.post(path, json=chat({"type": "image_url", "image_url": {"url": URL, "detail": "huge"}}))
    assert (bad.status_code, "detail" in bad.json()["error"]["param"]) == (400, True)


async def test_openai_responses(client: httpx.AsyncClient, service: FakeService) -> None:
    images = [
        {"type": "input_image", "image_url": URL, "detail": "low"},
        {"type": "input_image", "image_url": REMOTE},
        {"type": "input_image", "file_id": "file-abc"},
    ]
    expected = (TEXT, ContentPart("image", URL, detail="low"), FETCHED, STORED)
    given = {"model": MODEL, "input": [{"role": "user", "content": [text("input_text"), *images]}]}
    assert await parts_of(client, service, "/v1/responses", given) == expected
    call = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [text("input_text"), *images]}
    given = {"model": MODEL, "input": [{"role": "user", "content": "Go"}, call, result]}
    assert await parts_of(client, service, "/v1/responses", given) == expected
    assert service.requests[-1].messages[-1].role == "tool"  # type: ignore[index]


async def test_a_stored_response_keeps_its_images(client: httpx.AsyncClient, service: FakeService) -> None:
    image = {"type": "input_image", "image_url": URL, "detail": "low"}
    body = {"model": MODEL, "input": [{"role": "user", "content": [image, text("input_text")]}]}
    first = (await client.post("/v1/responses", json=body)).json()["id"]
    (item,) = (await client.get(f"/v1/responses/{first}/input_items")).json()["data"]
    assert item["content"][0] == image
    body = {"model": MODEL, "input": "And now?", "previous_response_id": first}
    await client.post("/v1/responses", json=body)
    messages = service.requests[-1].messages
    assert messages is not None
    assert messages[0].parts == (ContentPart("image", URL, detail="low"), TEXT)


async def test_anthropic_messages(client: httpx.AsyncClient, service: FakeService) -> None:
    sources = [
        {"type": "base64", "media_type": "image/png", "data": BASE64},
        {"type": "url", "url": REMOTE},
        {"type": "file", "file_id": "file-abc"},
    ]
    images = [{"type": "image", "source": source} for source in sources]
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": [*images, text()]}]}
    assert await parts_of(client, service, "/v1/messages", body) == (IMAGE, FETCHED, STORED, TEXT)
    use = {"type": "tool_use", "id": "t", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text(), *images]}
    turns = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": [use]}]
    body["messages"] = [*turns, {"role": "user", "content": [result]}]
    assert await parts_of(client, service, "/v1/messages", body) == (TEXT, IMAGE, FETCHED, STORED)
    result["is_error"] = True
    assert (await parts_of(client, service, "/v1/messages", body))[0] == ContentPart("text", "Error: ")
    body["messages"] = [turns[0], {"role": "assistant", "content": [images[0]]}]
    assert (await client.post("/v1/messages", json=body)).status_code == 400


@pytest.mark.parametrize("image", [BASE64, URL, list(FILE)], ids=["base64", "data URL", "bytes"])
async def test_workers_ai(client: httpx.AsyncClient, service: FakeService, image: Any) -> None:
    path = f"/client/v4/accounts/local/ai/run/{MODEL}"
    assert await parts_of(client, service, path, {"prompt": "What is this?", "image": image}) == (IMAGE, TEXT)
    messages = [{"role": "user", "content": "What is this?"}]
    assert await parts_of(client, service, path, {"messages": messages, "image": image}) == (IMAGE, TEXT)
    messages = chat({"type": "image_url", "image_url": {"url": URL}}, text())["messages"]
    assert await parts_of(client, service, path, {"messages": messages}) == (IMAGE, TEXT)


@pytest.mark.parametrize("image", [[300], {"a": 1}, 5, "aGVsbG8=", [1, 2, 3]])
async def test_workers_ai_refuses_what_is_no_image(client: httpx.AsyncClient, image: Any) -> None:
    answer = await client.post(f"/client/v4/accounts/local/ai/run/{MODEL}", json={"prompt": "?", "image": image})
    assert (answer.status_code, "`image`" in answer.text) == (400, True)


async def test_an_image_of_more_bytes_than_a_body_may_have_values(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """The values of a list of bytes are no values that a message could have."""
    path = f"/client/v4/accounts/local/ai/run/{MODEL}"
    body = {"prompt": "What is this?", "image": list(FILE + bytes(300_000))}
    (image, _) = await parts_of(client, service, path, body)
    assert len(image.value) > 400_000
    many = {"prompt": "?", "tools": list(range(300_000))}
    assert (await client.post(path, json=many)).status_code == 413


async def test_ollama(client: httpx.AsyncClient, service: FakeService) -> None:
    message = {"role": "user", "content": "What is this?", "images": [BASE64]}
    body = {"model": MODEL, "messages": [message], "stream": False}
    assert await parts_of(client, service, "/api/chat", body) == (IMAGE, TEXT)
    body = {"model": MODEL, "prompt": "What is this?", "images": [BASE64], "stream": False}
    assert await parts_of(client, service, "/api/generate", body) == (IMAGE, TEXT)


async def test_usage_itemizes_the_tokens_of_images(client: httpx.AsyncClient, service: FakeService) -> None:
    usage = Usage(prompt_tokens=90, image_tokens=64, completion_tokens=1)
    service.script = says(TextDelta(0, "Red"), ChoiceDone(0, "stop"), usage=usage)
    body = chat({"type": "image_url", "image_url": URL}, text())
    told = (await client.post("/v1/chat/completions", json=body)).json()["usage"]["prompt_tokens_details"]
    assert told["image_tokens"] == 64
    given = {"model": MODEL, "input": "?"}
    assert (await client.post("/v1/responses", json=given)).json()["usage"]["input_tokens_details"][
        "image_tokens"
    ] == 64
    path = f"/client/v4/accounts/local/ai/run/{MODEL}"
    told = (await client.post(path, json={"prompt": "?"})).json()["result"]["usage"]["prompt_tokens_details"]
    assert told["image_tokens"] == 64


async def test_video_is_refused_by_name(client: httpx.AsyncClient) -> None:
    body = chat(text(), {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}})
    error = (await client.post("/v1/chat/completions", json=body)).json()["error"]
    assert ("video_url" in error["message"], error["param"]) == (True, "messages[0].content[1].type")
