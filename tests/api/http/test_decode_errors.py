"""Messages about invalid bodies are in the API's terms, not the decoder's."""

import httpx
import pytest

from tests.api.fake_service import MODEL

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"temperature": "hot"}, "`temperature` must be a number, not a string", "temperature"),
        ({"temperature": 3}, "`temperature` must be at most 2", "temperature"),
        ({"n": 0}, "`n` must be at least 1", "n"),
        ({"stream": "yes"}, "`stream` must be true or false, not a string", "stream"),
        ({"stop": 5}, "`stop` must be a string or a list, not an integer", "stop"),
        ({"stop": [""]}, "`stop[0]` must have at least 1 character", "stop[0]"),
        ({"guided_choice": []}, "`guided_choice` must have at least 1 entry", "guided_choice"),
        ({"reasoning_effort": "x"}, "`reasoning_effort` has the value 'x', which is not supported", "reasoning_effort"),
        ({"response_format": {}}, "`response_format.type` is missing", "response_format.type"),
        ({"chat_template_kwargs": {"x": 1}}, "`chat_template_kwargs` has an unknown field `x`", "chat_template_kwargs"),
        (
            {"logit_bias": {"a": 1}},
            "`logit_bias` has the key 'a': its keys are token ids, as decimal numbers in quotes",
            "logit_bias",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "`messages[0].content[0].image_url` must be an https:// URL,"
            " or the image itself as data:image/png;base64,…",
            "messages[0].content[0].image_url",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]},
            "`messages[0].content[0].type` has the value 'video_url', which is not supported; only text and images are",
            "messages[0].content[0].type",
        ),
    ],
)
async def test_messages(client: httpx.AsyncClient, fields: dict, message: str, param: str) -> None:
    answer = await client.post("/v1/chat/completions", json=CHAT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, message, param)


async def test_a_body_that_is_no_object(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=[1])
    assert answer.json()["error"]["message"] == "the body must be an object, not a list"


async def test_items_of_a_response(client: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": [{"type": "message", "role": "user", "content": 5}]}
    error = (await client.post("/v1/responses", json=body)).json()["error"]
    assert error["message"].startswith("`input[0].content` must be a string or a list")
    assert error["param"] == "input[0].content"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"temperature": "hot"}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/responses", {"input": 5}),
        ("/v1/messages", CHAT | {"max_tokens": "x"}),
        ("/v1/messages/count_tokens", {"messages": 5}),
        ("/client/v4/accounts/a/ai/run/nobody", {"prompt": 5}),
        ("/client/v4/accounts/a/ai/run", {"input": 5}),
    ],
)
async def test_an_unknown_model_comes_before_what_is_wrong_with_the_body(
    client: httpx.AsyncClient, path: str, body: dict
) -> None:
    answer = await client.post(path, json=body | {"model": "nobody"})
    assert "nobody" in answer.text
    assert answer.status_code in (400, 404)
