"""Images in the bodies of every API: the same parts of the canonical request, whichever client has sent them."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from emberline.api.gateway.gemini import GenerateContent
from emberline.images.request_images import image_places
from emberline.images.sources import FILE_SCHEME
from emberline.protocol.errors import BadInput
from emberline.protocol.events import ChoiceDone, Started, TextDelta, TextEvent, Usage
from emberline.protocol.request import ContentPart, GenerateRequest
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


USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "shot", "input": {}}]}
ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "url", "url": REMOTE}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [text(), ANTHROPIC_IMAGE]}
CALL = {"type": "function_call", "call_id": "c", "name": "shot", "arguments": "{}"}
INPUT_IMAGE = {"type": "input_image", "image_url": REMOTE}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}
RUN = f"/client/v4/accounts/local/ai/run/{MODEL}"
PLACES = [
    ("/v1/chat/completions", chat(text(), {"type": "image_url", "image_url": URL}), (0, 1), "messages[0].content[1]"),
    ("/v1/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, (0, 0), "input[0].content[0]"),
    ("/v1/responses", {"instructions": "Hi", "input": [CALL, OUTPUT]}, (2, 0), "input[1].output[0]"),
    ("/v1/messages", {"messages": [{"role": "user", "content": [ANTHROPIC_IMAGE]}]}, (0, 0), "messages[0].content[0]"),
    (
        "/v1/messages",
        {"messages": [USE, {"role": "user", "content": [RESULT, text(), ANTHROPIC_IMAGE]}]},
        (1, 2),
        "messages[1].content[0].content[1]",
    ),
    (
        "/v1/messages",
        {"messages": [USE, {"role": "user", "content": [RESULT, text(), ANTHROPIC_IMAGE]}]},
        (2, 1),
        "messages[1].content[2]",
    ),
    (RUN, {"prompt": "?", "image": BASE64}, (0, 0), "image"),
    (RUN, {"messages": chat(text())["messages"], "image": BASE64}, (0, 0), "image"),
    ("/api/generate", {"system": "Hi", "prompt": "?", "images": [BASE64, BASE64]}, (1, 1), "images[1]"),
    ("/api/chat", {"messages": [{"role": "user", "images": [BASE64, BASE64]}]}, (0, 1), "messages[0].images[1]"),
]


@pytest.mark.parametrize(("path", "body", "place", "field"), PLACES)
async def test_errors_name_the_place_where_the_client_has_sent_the_image(
    client: httpx.AsyncClient, service: FakeService, path: str, body: Json, place: tuple[int, int], field: str
) -> None:
    where = f"messages[{place[0]}].content[{place[1]}]"

    async def refuse(request: GenerateRequest) -> AsyncIterator[TextEvent]:
        assert request.messages is not None
        assert request.messages[place[0]].parts[place[1]].kind == "image"
        yield Started(Usage())
        raise BadInput(f"image 1 of the request (`{where}`) cannot be used: no", param=where)

    service.script = refuse
    more = {"max_tokens": 9} if path == "/v1/messages" else {}
    answer = await client.post(path, json={"model": MODEL, "stream": False, **more, **body})
    assert (answer.status_code, f"(`{field}`)" in answer.text) == (400, True), answer.text
    error = answer.json().get("error")
    if isinstance(error, dict) and "param" in error:
        assert error["param"] == field


def test_places_of_gemini() -> None:
    """Parts that are no text and no image have no place in the canonical message."""
    blob = {"inlineData": {"mimeType": "image/png", "data": BASE64}}
    shot = {"functionResponse": {"name": "shot", "response": {}, "parts": [blob]}}
    contents = [{"parts": [shot, {"text": "And?"}, blob]}]
    body = msgspec.convert({"systemInstruction": {"parts": [{"text": "Hi"}]}, "contents": contents}, GenerateContent)
    request, names = body.to_request(MODEL, "r", None)
    places = [f"messages[{place.message}].content[{place.part}]" for place, _ in image_places(request.messages)]
    assert [names.of(place) for place in places] == [
        "contents[0].parts[0].functionResponse.parts[0]",
        "contents[0].parts[2]",
    ]


@pytest.mark.parametrize(
    ("path", "content", "supported"),
    [
        ("/v1/chat/completions", {"type": "input_image"}, "text, refusal, image_url"),
        ("/v1/messages", {"type": "document"}, "text, image, tool_use, tool_result, thinking, redacted_thinking"),
        ("/v1/messages", {"type": "image", "source": {"type": "gcs"}}, "base64, url, file"),
        ("/v1/responses", {"type": "image_url"}, "input_image"),
    ],
)
async def test_a_part_of_an_unknown_type_names_the_types_there_are(
    client: httpx.AsyncClient, path: str, content: Json, supported: str
) -> None:
    body = {
        "model": MODEL,
        "input" if path == "/v1/responses" else "messages": [{"role": "user", "content": [content]}],
    }
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "which is not supported; it must be one of " in message
    assert supported in message.rpartition(" one of ")[2]
