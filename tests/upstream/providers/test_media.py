"""Embeddings, images, speech and video of providers, through OpenAI's API and `run`."""

import base64
import struct
from collections.abc import AsyncIterator

import pytest

from emberline.accounts.account import Limits
from emberline.accounts.audit_log import Actor
from emberline.accounts.prices import PriceVersion
from emberline.config import ProviderConfig
from emberline.protocol.price import Price
from emberline.upstream.dialects import openai_media
from standins.standin_providers import ProviderScript, StandinOpenAI
from tests.upstream.providers.conftest import Gateway, Opener, StartProvider, configured

RUN = "/client/v4/accounts/a/ai/run"


@pytest.fixture
async def server() -> AsyncIterator[StandinOpenAI]:
    server = StandinOpenAI()
    await server.start()
    yield server
    await server.close()


async def acme(gateway: Opener, server: StandinOpenAI) -> Gateway:
    return await gateway(ProviderConfig(name="acme", url=server.url, key=server.key))


def set_price(made: Gateway, model: str, price: Price) -> None:
    made.core.prices.add(
        PriceVersion(model=model, number=1, valid_from_us=0, source="admin", created_us=0, price=price)
    )


async def test_embeddings(gateway: Opener, server: StandinOpenAI) -> None:
    made = await acme(gateway, server)
    set_price(made, "acme/embed-1", Price(input=1_000_000, cached_input=1_000_000))
    body = {"model": "acme/embed-1", "input": ["a", "b"], "dimensions": 2}
    answer = (await made.post("/v1/embeddings", body)).json()
    assert [row["embedding"] for row in answer["data"]] == [[0.0, 0.5], [1.0, 0.5]]
    assert answer["usage"]["prompt_tokens"] == 8
    packed = (await made.post("/v1/embeddings", body | {"encoding_format": "base64"})).json()["data"][1]["embedding"]
    assert struct.unpack("<2f", base64.b64decode(packed)) == (1.0, 0.5)
    native = (await made.post(f"{RUN}/acme/embed-1", {"text": ["a", "b"]})).json()["result"]
    assert (native["shape"], native["data"]) == ([2, 2], [[0.0, 0.5], [1.0, 0.5]])
    assert [(row[1], row[2], row[5]) for row in await made.rows()] == [("finished", 8, 8_000_000)] * 3
    assert server.requests[0] == {
        "model": "embed-1", "input": ["a", "b"], "encoding_format": "float", "dimensions": 2
    }  # fmt: skip
    ollama = await made.post("/api/embed", {"model": "acme/embed-1", "input": "a"})
    assert (ollama.status_code, len(ollama.json()["embeddings"])) == (200, 1), ollama.text
    refused = await made.post("/v1/embeddings", body | {"truncate": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate")


async def test_images(gateway: Opener, server: StandinOpenAI) -> None:
    made = await acme(gateway, server)
    set_price(made, "acme/gpt-image", Price(image=40_000))
    body = {"model": "acme/gpt-image", "prompt": "a cat", "n": 2, "quality": "low"}
    answer = (await made.post("/v1/images/generations", body)).json()
    assert len(answer["data"]) == 2
    assert server.requests[0] == {"model": "gpt-image", "prompt": "a cat", "n": 2, "quality": "low"}
    files = {"image": ("a.png", b"\x89PNG...", "image/png")}
    form = {"model": "acme/gpt-image", "prompt": "a hat"}
    edited = await made.client.post("/v1/images/edits", data=form, files=files)
    assert edited.status_code == 200, edited.text
    assert b'name="model"\r\n\r\ngpt-image\r\n' in server.requests[1]["form"]
    assert b"\x89PNG..." in server.requests[1]["form"]
    native = await made.post(f"{RUN}/acme/gpt-image", {"prompt": "a cat", "width": 64, "height": 64})
    assert native.json()["result"] == {"image": "iVBORw0KGgo="}
    assert server.requests[2]["size"] == "64x64"
    assert [row[5] for row in await made.rows()] == [80_000 * 10**6, 40_000 * 10**6, 40_000 * 10**6]
    for options, message in (
        ({"gateway": {"id": "strict"}}, "it has no gateways"),
        ({"queueRequest": True}, "has no queue"),
        ({"gateway": "x"}, "`options` cannot be read"),
    ):
        refused = await made.post(f"{RUN}/acme/gpt-image", {"prompt": "a cat", "options": options})
        assert message in refused.text, "neither ignored nor sent to the provider"
    assert len(server.requests) == 3


async def test_a_number_out_of_range_is_refused(gateway: Opener, server: StandinOpenAI) -> None:
    made = await acme(gateway, server)
    raw = b'{"model": "acme/gpt-image", "prompt": "a cat", "unknown": 1e999}'
    answer = await made.client.post("/v1/images/generations", content=raw)
    assert (answer.status_code, server.requests) == (400, [])
    assert "out of range" in answer.json()["error"]["message"]


async def test_speech_both_ways(gateway: Opener, server: StandinOpenAI) -> None:
    made = await acme(gateway, server)
    set_price(made, "acme/tts-1", Price(input=15_000_000, cached_input=15_000_000))  # per million characters
    set_price(made, "acme/whisper-1", Price(audio_second=100_000))
    spoken = await made.post("/v1/audio/speech", {"model": "acme/tts-1", "input": "Hello", "voice": "alloy"})
    assert (spoken.content, spoken.headers["content-type"]) == (b"audio bytes", "audio/mpeg")
    native = await made.post(f"{RUN}/acme/tts-1", {"text": "Hello"})
    assert native.content == b"audio bytes"
    form = {"model": "acme/whisper-1", "language": "en", "response_format": "verbose_json"}
    files = {"file": ("a.wav", b"RIFF....")}
    heard = (await made.client.post("/v1/audio/transcriptions", data=form, files=files)).json()
    assert (heard["text"], heard["duration"]) == ("Hello there.", 1.5)
    assert b'name="language"\r\n\r\nen\r\n' in server.requests[2]["form"]
    native = await made.client.post(f"{RUN}/acme/whisper-1", content=b"RIFF....")
    assert native.json()["result"]["text"] == "Hello there."
    costs = [row[5] for row in await made.rows()]
    assert costs == [75_000_000, 75_000_000, 150_000_000, 150_000_000]


async def test_video(gateway: Opener, server: StandinOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_media, "VIDEO_POLL_S", 0.01)
    made = await acme(gateway, server)
    answer = await made.post(RUN, {"model": "acme/sora-2", "input": {"prompt": "a cat", "seconds": "4"}})
    assert (answer.content, answer.headers["content-type"]) == (b"mp4 bytes", "video/mp4")
    ((audio_ms,),) = await made.store.read("SELECT audio_ms FROM usage")
    assert audio_ms == 4000


async def test_an_account_with_a_budget_pays_for_all_of_it(
    gateway: Opener, server: StandinOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_media, "VIDEO_POLL_S", 0.01)
    made = await gateway(ProviderConfig(name="acme", url=server.url, key=server.key), keys=True)
    set_price(made, "acme/sora-2", Price(audio_second=1_000_000))
    set_price(made, "acme/gpt-image", Price(image=1000, output=1_000_000))
    await made.accounts.create_account(Actor("test"), "rich", Limits(budget_pico=10**15))
    key = (await made.accounts.create_key(Actor("test"), "rich")).key.text
    run = RUN.replace("/a/", "/rich/")
    for model, body in (("acme/sora-2", {"prompt": "a cat", "seconds": "4"}), ("acme/gpt-image", {"prompt": "x"})):
        answer = await made.post(f"{run}/{model}", body, authorization=f"Bearer {key}")
        assert answer.status_code == 200, answer.text
    video, image = await made.rows()
    assert video[5] == 4 * 10**9
    assert image[5] == 1000 * 10**6 + image[4] * 10**6
    assert image[4] > 1
    for n in ("5", 0, 17, True, 10**30):
        answer = await made.post(f"{run}/acme/gpt-image", {"prompt": "x", "n": n}, authorization=f"Bearer {key}")
        assert (answer.status_code, "`n`" in answer.text) == (400, True), answer.text


async def test_gemini(gateway: Opener, provider_server: StartProvider) -> None:
    server = await provider_server("gemini")
    made = await gateway(configured("gemini", server))
    answer = await made.post("/v1/embeddings", {"model": "gemini/gemini-embedding-001", "input": ["a", "b"]})
    assert [row["embedding"] for row in answer.json()["data"]] == [[0.0, 0.5], [1.0, 0.5]]
    image = await made.post("/v1/images/generations", {"model": "gemini/gemini-3-image", "prompt": "a cat"})
    assert image.json()["data"] == [{"b64_json": "iVBORw0KGgo="}]
    refused = await made.post(
        "/v1/images/generations", {"model": "gemini/gemini-3-image", "prompt": "a cat", "size": "1x1"}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "size")
    other = await provider_server("anthropic")
    none = await (await gateway(configured("anthropic", other))).post(
        "/v1/embeddings", {"model": "anthropic/claude-embed", "input": "a"}
    )
    assert none.status_code == 400


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (ProviderScript(status=429, retry_after="9"), 429),
        (ProviderScript(status=500), 503),
        (ProviderScript(html=True), 503),
        (ProviderScript(status=401), 403),
    ],
)
async def test_failures_are_named_and_cost_nothing(
    gateway: Opener, server: StandinOpenAI, script: ProviderScript, status: int
) -> None:
    made = await acme(gateway, server)
    set_price(made, "acme/gpt-image", Price(image=40_000))
    server.script = script
    answer = await made.post("/v1/images/generations", {"model": "acme/gpt-image", "prompt": "a cat"})
    assert answer.status_code == status
    assert "provider acme" in answer.json()["error"]["message"]
    assert [(row[1], row[5]) for row in await made.rows()] == [("failed", 0)]


async def test_models_that_make_none_say_so(gateway: Opener) -> None:
    made = await gateway()
    answer = await made.post("/v1/images/generations", {"model": "nothing/here", "prompt": "a cat"})
    assert answer.status_code == 404
