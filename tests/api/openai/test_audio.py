"""Transcriptions as the OpenAI API has them."""

import httpx
import pytest

from emberline.api.http.exchange import RequestLimits
from tests.api.fake_service import SPEECH, FakeService, client_of
from tests.lazy_modules import openai

URL = "/v1/audio/transcriptions"
FILE = {"file": ("a.wav", b"RIFF....", "audio/wav")}


async def post(client: httpx.AsyncClient, url: str = URL, **fields: str | list[str]) -> httpx.Response:
    return await client.post(url, data={"model": SPEECH.id, **fields}, files=FILE)


async def test_formats(client: httpx.AsyncClient) -> None:
    assert (await post(client)).json() == {"text": "Hello -->  world.", "usage": {"type": "duration", "seconds": 2}}
    assert (await post(client, response_format="text")).text == "Hello -->  world.\n"
    line = "Hello -> world.\n"
    assert (await post(client, response_format="srt")).text == f"1\n00:00:00,000 --> 01:01:01,500\n{line}"
    assert (await post(client, response_format="vtt")).text == f"WEBVTT\n\n00:00:00.000 --> 01:01:01.500\n{line}"
    verbose = (await post(client, response_format="verbose_json")).json()
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "en", 1.25)
    assert verbose["segments"][0]["end"] == 3661.5
    assert "words" not in verbose
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word"]}
    assert (await post(client, **fields)).json()["words"] == [
        {"word": "Hello", "start": 0.0, "end": 0.5},
        {"word": "world.", "start": 0.5, "end": 1.25},
    ]


async def test_the_request(client: httpx.AsyncClient, service: FakeService) -> None:
    await post(client, language="de", prompt="Emberline", temperature="0.5")
    await post(client, "/v1/audio/translations")
    first, second = service.speech_requests
    assert (first.audio, first.language, first.prompt, first.temperature) == (b"RIFF....", "de", "Emberline", 0.5)
    assert (first.translate, second.translate) == (False, True)
    assert {first.api, second.api} == {"audio"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "docx"}, "response_format"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "warm"}, None),
        ({"language": "the queen's english"}, "language"),
        ({"stream": "true"}, "stream"),
        ({"include[]": ["logprobs"]}, "include"),
        ({"timestamp_granularities[]": ["word"]}, "timestamp_granularities"),
        ({"volume": "11"}, "volume"),
        ({"model": "nope"}, "model"),
        ({"model": ""}, "model"),
    ],
)
async def test_bad_forms(client: httpx.AsyncClient, fields: dict[str, str], param: str | None) -> None:
    answer = await post(client, **fields)
    assert answer.status_code in (400, 404)
    assert param is None or answer.json()["error"]["param"] == param


async def test_files_that_are_missing_or_too_large(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await client.post(URL, json={"model": SPEECH.id})).status_code == 400
    answer = await client.post(URL, files={"model": (None, SPEECH.id)})
    assert answer.json()["error"]["param"] == "file"
    async with client_of(service, limits=RequestLimits(max_audio_bytes=4)) as client:
        assert (await post(client)).status_code == 413


async def test_with_openai_s_client(service: FakeService) -> None:
    async with client_of(service) as http:
        api = openai.AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http)
        found = await api.audio.transcriptions.create(model=SPEECH.id, file=("a.mp3", b"ID3"))
    assert found.text == "Hello -->  world."
