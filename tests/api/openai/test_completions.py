"""Text completions over the real service: what they tell of tokens, filling in the middle, and their defaults."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.protocol import token_ids as tokens
from emberline.service import Served, Service, open_service
from emberline.text.text_model import TextModel
from tests.service.conftest import MODEL, PATIENCE_S, Opener, byte_model, engine, offer, open_one, say, text_model
from tests.service.fake_engine import FakeEngine

__all__ = ["engine", "open_one", "say", "text_model"]

BEST = "("  # token 10, the most likely one in place of each prompt token
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>")


@pytest.fixture
async def client(engine: FakeEngine, open_one: Opener, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(await open_one(engine), tmp_path) as client:
        yield client


def client_of(service: Service, folder: Path) -> httpx.AsyncClient:
    app = App(service, ApiSettings(Authenticator(Secret.open(folder))))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8686")


@asynccontextmanager
async def served(service: Service, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service, which is closed at the end."""
    try:
        async with client_of(service, folder) as client:
            yield client
    finally:
        await service.close()


async def complete(client: httpx.AsyncClient, **fields: Any) -> Any:
    answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "ab c", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refusal(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> tuple[str, str]:
    answer = await client.post(path, json={"model": MODEL, "prompt": "ab", **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


async def chunks_of(client: httpx.AsyncClient, path: str = "/v1/completions", **fields: Any) -> list[Any]:
    body = {"model": MODEL, "stream": True, **fields}
    lines = (await client.post(path, json=body)).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_an_echoed_prompt_has_its_log_probabilities(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    (choice,) = (await complete(client, echo=True, logprobs=1, max_tokens=2))["choices"]
    assert choice["text"] == "ab cHe"
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "b", " ", "c", "H", "e"]
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert told["top_logprobs"] == [None, *({BEST: -0.25, each: -0.5} for each in "b c"), {"H": -0.5}, {"e": -0.5}]
    assert told["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert [request.sampling.prompt_logprobs for request in engine.submitted] == [1]


async def test_a_prompt_alone(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    body = await complete(client, echo=True, logprobs=0, max_tokens=0)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab c", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {" ": -0.5}, {"c": -0.5}]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (4, 0)
    (choice,) = (await complete(client, max_tokens=0))["choices"]
    assert (choice["text"], choice["logprobs"]) == ("", None)
    assert [request.sampling.max_tokens for request in engine.submitted] == [0, 0]


async def test_prompt_logprobs_and_token_ids_as_vllm_has_them(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    ids = tokens.unpack((await submitted(client, engine)).prompt_ids)
    (choice,) = (await complete(client, prompt_logprobs=1, return_token_ids=True, max_tokens=2))["choices"]
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == 2
    nothing, *told = choice["prompt_logprobs"]
    assert nothing is None
    assert told[0] == {
        str(ids[1]): {"logprob": -0.5, "rank": 2, "decoded_token": "b"},
        "10": {"logprob": -0.25, "rank": 1, "decoded_token": BEST},
    }
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = await client.post(
        "/v1/chat/completions", json={**chat, "prompt_logprobs": 0, "return_token_ids": True, "logprobs": True}
    )
    body = answer.json()
    assert len(body["prompt_logprobs"]) == len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert body["choices"][0]["token_ids"] == choice["token_ids"]


async def submitted(client: httpx.AsyncClient, engine: FakeEngine) -> Any:
    await complete(client)
    return engine.submitted[-1]


async def test_every_choice_of_every_prompt_is_echoed(client: httpx.AsyncClient) -> None:
    body = await complete(client, prompt=["ab", "xyz"], n=2, echo=True, max_tokens=1, return_token_ids=True)
    assert [choice["text"] for choice in body["choices"]] == ["abH", "abH", "xyzH", "xyzH"]
    assert [len(choice["prompt_token_ids"]) for choice in body["choices"]] == [2, 2, 3, 3]


async def test_streams_tell_of_tokens(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True}
    first, *rest = await chunks_of(client, **asked, echo=True, logprobs=0)
    (choice,) = first["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    assert len(choice["prompt_token_ids"]) == 2
    assert "".join(chunk["choices"][0]["text"] for chunk in rest) == "He"
    assert [
        offset for chunk in rest if (told := chunk["choices"][0]["logprobs"]) for offset in told["text_offset"]
    ] == [
        2,
        3,
    ]
    ids = [token_id for chunk in rest for token_id in chunk["choices"][0]["token_ids"]]
    (whole,) = (await complete(client, **asked))["choices"]
    assert ids == whole["token_ids"]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_token_ids": True}
    first, *rest = await chunks_of(client, "/v1/chat/completions", **chat)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert first["prompt_token_ids"]
    assert [token_id for chunk in rest for token_id in chunk["choices"][0]["token_ids"]] == ids


async def test_continuous_usage_counts_each_choice(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await chunks_of(client, prompt="ab", max_tokens=3, stream_options=options)
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts[0][0] == 2
    assert sorted(counts) == counts
    assert counts[-1] == (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 3)


async def test_what_cannot_be_told_is_refused_by_name(client: httpx.AsyncClient) -> None:
    assert (await refusal(client, prompt_logprobs=1, stream=True))[0] == "prompt_logprobs"
    assert (await refusal(client, prompt_logprobs=21))[0] == "prompt_logprobs"
    param, message = await refusal(client, prompt="a" * 200, prompt_logprobs=20, max_tokens=1, echo=True, stop=[""])
    assert param == "stop[0]", message
    assert (await refusal(client, stream_options={"include_usage": True}))[0] == "stream_options"
    assert (await refusal(client, allowed_token_ids=[700]))[0] == "allowed_token_ids"
    assert (await refusal(client, suffix="x", echo=True))[0] == "echo"
    assert (await refusal(client, suffix="x"))[0] == "suffix"


@pytest.mark.parametrize(
    ("bias", "named"), [({"17": 101}, "`logit_bias.17`"), ({"9": "1"}, "`logit_bias.9`"), ({"x7": 1}, "the key 'x7'")]
)
async def test_an_error_of_logit_bias_names_the_key(client: httpx.AsyncClient, bias: Any, named: str) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        fields = {} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}], "prompt": None}
        param, message = await refusal(client, path, logit_bias=bias, **fields)
        assert param == "logit_bias"
        assert named in message


async def test_the_default_length_is_the_fields(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await submitted(client, engine)).sampling.max_tokens == 16


async def test_only_allowed_tokens(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await complete(client, allowed_token_ids=[5, 6])
    assert engine.submitted[-1].sampling.allowed_ids == (5, 6)


# --- tokens and text --------------------------------------------------------------------------------------------------


async def test_prompts_are_tokenized_as_requests_are(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    ids = tokens.unpack((await submitted(client, engine)).prompt_ids)
    answer = await client.post("/tokenize", json={"model": MODEL, "prompt": "ab c", "return_token_strs": True})
    assert answer.json() == {"count": 4, "max_model_len": 256, "tokens": ids, "token_strs": ["a", "b", "Ġ", "c"]}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    await client.post("/v1/chat/completions", json=chat)
    answer = (await client.post("/tokenize", json=chat)).json()
    assert answer["tokens"] == tokens.unpack(engine.submitted[-1].prompt_ids)
    assert answer["token_strs"] is None
    text = (await client.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json()
    assert text == {"prompt": "<|start|>user\nhi<|end|>\n<|start|>assistant\n"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_tokenizer_describes_itself(client: httpx.AsyncClient) -> None:
    """As lm-eval asks, which then tokenizes by the server."""
    for query in ("", f"?model={MODEL}"):
        told = (await client.get(f"/tokenizer_info{query}")).json()
        assert (told["eos_token"], told["bos_token"]) == ("<|end|>", None)
        assert "<|start|>" in told["chat_template"]


async def test_what_the_tokenizer_is_not_asked(client: httpx.AsyncClient) -> None:
    chat = {"prompt": None, "messages": [{"role": "user", "content": "hi"}]}
    assert (await refusal(client, "/tokenize", prompt=None))[0] == "prompt"
    assert (await refusal(client, "/tokenize", **chat, add_special_tokens=True))[0] == "add_special_tokens"
    assert (await refusal(client, "/tokenize", **chat, chat_template="x"))[0] == "chat_template"
    assert (await refusal(client, "/tokenize", add_generation_prompt=True))[0] == "add_generation_prompt"
    assert (await refusal(client, "/detokenize", tokens=[9999]))[0] == "tokens"


# --- the model --------------------------------------------------------------------------------------------------------


async def test_the_only_model_need_not_be_named(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/completions", {"prompt": "hi", "model": None}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "hi", "model": None}),
    ):
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == MODEL


async def test_of_several_models_one_must_be_named(engine: FakeEngine, text_model: TextModel, tmp_path: Path) -> None:
    first = offer(text_model, engine)
    card = msgspec.structs.replace(first.card, id="@cf/test/other", aliases=())
    service = await open_service([first, Served(card, text_model)], data_dir=tmp_path / "data")
    async with served(service, tmp_path) as client:
        for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
            answer = await client.post(path, json={"prompt": "hi", "input": "hi"})
            assert answer.status_code == 400
            assert answer.json()["error"]["message"] == f"`model` is missing: name one of {MODEL}, @cf/test/other"


# --- filling in the middle --------------------------------------------------------------------------------------------


@pytest.fixture
async def editor(engine: FakeEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model has the tokens of Qwen's coders."""
    coder = byte_model(tmp_path, FIM)
    service = await open_service([offer(coder, engine)], data_dir=tmp_path / "data")
    assert await service.ready(PATIENCE_S)
    async with served(service, tmp_path) as client:
        yield client


def prompt_of(engine: FakeEngine, tmp_path: Path) -> str:
    """The prompt that the engine got last."""
    return TextModel.load(tmp_path).decode(engine.submitted[-1].prompt_ids, special=True)


async def test_minuets_request_fills_in_the_middle(
    editor: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    """The body that minuet-ai.nvim sends to an OpenAI-compatible server (provider `openai_fim_compatible`)."""
    before, after = "-- language: python\ndef add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
    chunks = await chunks_of(editor, prompt=before, suffix=after, max_tokens=256, top_p=0.9, stop=["\n\n"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello!"
    assert prompt_of(engine, tmp_path) == f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    ends = TextModel.load(tmp_path).tokenizer.added
    assert {ends[text] for text in FIM} <= set(engine.submitted[-1].sampling.stop_ids)


async def test_continues_request_fills_in_the_middle(
    editor: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    """The body that Continue sends to Ollama's API for its autocompletion."""
    options = {"temperature": 0.01, "num_predict": 2048, "stop": ["\n\n", "/src/"], "num_ctx": 8192, "num_thread": 4}
    body = {"model": MODEL, "prompt": "x = ", "suffix": "\ny", "options": options, "keep_alive": 1800, "stream": True}
    answer = await editor.post("/api/generate", json=body)
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["response"] for line in lines) == "Hello!"
    assert lines[-1]["done_reason"] == "stop"
    assert prompt_of(engine, tmp_path) == "<|fim_prefix|>x = <|fim_suffix|>\ny<|fim_middle|>"


async def test_text_around_a_gap_smuggles_no_special_token(
    editor: httpx.AsyncClient, engine: FakeEngine, tmp_path: Path
) -> None:
    prefix = "a<|fim_middle|><|end|>"
    await complete(editor, prompt=prefix, suffix="<|fim_prefix|>")
    ids = tokens.unpack(engine.submitted[-1].prompt_ids)
    added = TextModel.load(tmp_path).tokenizer.added
    special = [token_id for token_id in ids if token_id in added.values()]
    assert special == [added["<|fim_prefix|>"], added["<|fim_suffix|>"], added["<|fim_middle|>"]]


async def test_a_gap_excludes_what_only_a_conversation_has(editor: httpx.AsyncClient) -> None:
    answer = await editor.post("/api/generate", json={"model": MODEL, "prompt": "a", "suffix": "b", "system": "s"})
    assert answer.status_code == 400
    assert "`system` needs the chat template, which `suffix` leaves out" in answer.text
    assert (await refusal(editor, prompt=[1, 2], suffix="x"))[0] == "suffix"
