"""Workers AI's `run` of a speech model."""

import base64

import httpx
import jsonschema_rs
import pytest

from tests.api.fake_service import SPEECH, FakeService

URL = f"/client/v4/accounts/acme/ai/run/{SPEECH.id}"
AUDIO = b"RIFF\x00\xff{}"


async def test_audio_in_every_form(client: httpx.AsyncClient, service: FakeService) -> None:
    encoded = base64.b64encode(AUDIO).decode()
    for answer in (
        await client.post(URL, content=AUDIO),
        await client.post(URL, content=AUDIO, headers={"content-type": "audio/wav"}),
        await client.post(URL, content=AUDIO, headers={"content-type": "application/x-www-form-urlencoded"}),
        await client.post(URL, json={"audio": list(AUDIO)}),
        await client.post(URL, json={"audio": encoded}),
        await client.post(URL, json={"audio": f"data:audio/wav;base64,{encoded}", "language": "en"}),
        await client.post("/client/v4/accounts/acme/ai/run", json={"model": SPEECH.id, "input": {"audio": encoded}}),
    ):
        assert answer.status_code == 200, answer.text
        result = answer.json()["result"]
        assert (result["text"], result["word_count"]) == ("Hello -->  world.", 2)
        assert result["words"][1] == {"word": "world.", "start": 0.5, "end": 1.25}
        assert result["vtt"].startswith("WEBVTT\n\n00:00:00.000 --> ")
        assert result["transcription_info"]["duration"] == 1.25
    assert {request.audio for request in service.speech_requests} == {AUDIO}


async def test_a_gateway_in_the_options(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(URL, json={"audio": [1], "options": {"gateway": {"id": "strict"}}})
    assert answer.status_code != 200, "the rules of a gateway that is asked for apply, or nothing is done"
    assert "it has no gateways" in answer.text
    assert not service.speech_requests


async def test_options(client: httpx.AsyncClient, service: FakeService) -> None:
    options = {"task": "translate", "language": "de", "initial_prompt": "Emberline"}
    await client.post(URL, json={"audio": [1], **options})
    (request,) = service.speech_requests
    assert (request.translate, request.language, request.prompt) == (True, "de", "Emberline")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"audio": "not base64!"},
        {"audio": [1, 256]},
        {"audio": [1, -1]},
        {"audio": [1], "task": "sing"},
        {"audio": [1], "vad_filter": True},
        {"audio": [1], "beam_size": 9},
        {"audio": [1], "prefix": "So"},
        {"audio": [1], "options": {"queueRequest": True}},
        {"audio": [1], "options": {"gateway": {"id": 3}}},
    ],
)
async def test_bad_inputs(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    answer = await client.post(URL, json=body)
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["code"] in (5004, 5006)


async def test_the_queue_is_refused_by_name(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{URL}?queueRequest=true", content=AUDIO)
    assert "queueRequest" in answer.json()["errors"][0]["message"]


async def test_schema(client: httpx.AsyncClient) -> None:
    url = "/client/v4/accounts/acme/ai/models/schema"
    schema = (await client.get(url, params={"model": SPEECH.id})).json()["result"]
    accepts = jsonschema_rs.validator_for(schema["input"]).is_valid
    assert accepts({"audio": [0, 255]})
    assert accepts({"audio": "AAAA", "language": "en"})
    assert not accepts({"audio": [256]})
    assert not accepts({"prompt": "Hi"})
    result = (await client.post(URL, content=AUDIO)).json()["result"]
    assert jsonschema_rs.validator_for(schema["output"]).is_valid(result)
