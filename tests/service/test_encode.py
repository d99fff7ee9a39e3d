"""Texts encoded end to end, from the APIs over the service to an engine with a small model: vectors, scores, labels."""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from emberline.accounts.auth import Authenticator
from emberline.accounts.secret import Secret
from emberline.api.app import ApiSettings, App
from emberline.catalog.model_card import TEXT_CLASSIFICATION, TEXT_EMBEDDINGS, describe_path
from emberline.kernels.cpu import native_encoder
from emberline.models.encoder import PackedTexts
from emberline.protocol.errors import BadInput, EmberlineError, Forbidden
from emberline.protocol.request import EncodeRequest, GenerateRequest, Principal
from emberline.service import Served, Service, open_service
from emberline.service.core import LocalCore
from emberline.service.event_collector import result_of
from emberline.service.work import Work
from emberline.text.text_encoder import TextEncoder
from emberline.weights.task_config import task_of
from tests.encoders import MAX_LEN, VOCABULARY, EncoderThread, tiny_bert
from tests.lazy_modules import transformers
from tests.service.conftest import PATIENCE_S
from tests.service.test_service import row_of, rows

TOLERANCE = 1e-5
LABELS = {0: "bad", 1: "fine", 2: "good"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("embedder", "reranker", "classifier")}
    tiny_bert(made["embedder"])
    tiny_bert(made["reranker"], 1)
    tiny_bert(made["classifier"], 3, id2label=LABELS)
    return made


def served(folder: Path, *engines: EncoderThread) -> Served:
    card = describe_path(folder)
    return Served(card, TextEncoder.load(folder, task_of(folder)), tuple(engine.endpoint for engine in engines))


@asynccontextmanager
async def open_client(folder: Path, tmp_path: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Service, str]]:
    item = served(folder, EncoderThread(folder, tmp_path / "e.sock"))
    service = await open_service([item], data_dir=tmp_path)
    assert await service.ready(60)
    app: Any = App(service, ApiSettings(auth=Authenticator(Secret("0" * 64), None)))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
            yield client, service, item.card.id
    finally:
        await service.close()


@pytest.fixture(autouse=True)
def plain_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are compared exactly: by PyTorch's layers, not by C kernels, which multiply halves on ARM."""
    monkeypatch.setattr(native_encoder, "supports", lambda *_: False)


def ids_of(*texts: str) -> list[int]:
    """Of one text, or of a pair."""
    ids = [2]
    for text in texts:
        ids += [VOCABULARY.index(c if i == 0 else f"##{c}") for w in text.split() for i, c in enumerate(w)] + [3]
    return ids


def expected_vector(folder: Path, ids: list[int], pooling: str = "mean") -> torch.Tensor:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(hidden.mean(0) if pooling == "mean" else hidden[0], dim=0)


async def test_embeddings(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["embedder"]
    async with open_client(folder, tmp_path) as (client, service, model):
        texts = ["abc de", "Zebra", "x"]
        answer = await client.post("/v1/embeddings", json={"model": model, "input": texts})
        body = answer.json()
        for text, found in zip(texts, body["data"], strict=True):
            expected = expected_vector(folder, ids_of(text.lower()))
            np.testing.assert_allclose(found["embedding"], expected, atol=TOLERANCE)
        n_tokens = sum(len(ids_of(text.lower())) for text in texts)
        assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}

        packed = {"model": model, "input": ids_of("abc de"), "encoding_format": "base64"}
        found = (await client.post("/v1/embeddings", json=packed)).json()["data"]
        vector = np.frombuffer(base64.b64decode(found[0]["embedding"]), "<f4")
        np.testing.assert_allclose(vector, body["data"][0]["embedding"], atol=1e-6)

        run = f"/client/v4/accounts/a/ai/run/{model}"
        native = (await client.post(run, json={"text": "x", "pooling": "cls"})).json()["result"]
        assert (native["shape"], native["pooling"]) == ([1, 32], "cls")
        np.testing.assert_allclose(native["data"][0], expected_vector(folder, ids_of("x"), "cls"), atol=TOLERANCE)
        universal = {"model": model, "input": {"text": ["x", "y"]}}
        assert (await client.post("/client/v4/accounts/a/ai/run", json=universal)).json()["result"]["shape"] == [2, 32]

        row = await row_of(service, EncodeRequest(id=answer.headers["x-request-id"], model=model))
        assert (row.status, row.input_tokens, row.output_tokens) == ("finished", n_tokens, 0)
        schema = (await client.get(f"/client/v4/accounts/a/ai/models/schema?model={model}")).json()["result"]
        assert "text" in schema["input"]["properties"]
        assert "data" in schema["output"]["properties"]
        assert service.models.find(model, None).task == TEXT_EMBEDDINGS


@pytest.mark.parametrize(
    ("body", "field", "status", "says"),
    [
        ({"input": []}, "input", 400, "no text"),
        ({"input": ["a", ""]}, None, 200, ""),
        ({"input": ["x"] * 10_000}, "input", 400, "10,000 texts are too many for one request, which takes 2,048"),
        ({"input": ["x", "y" * (MAX_LEN + 1)]}, "input[1]", 400, "35 tokens"),
        ({"input": "y" * 10**5}, "input", 400, "100000 characters"),
        ({"input": "y" * 10**5, "truncate": True}, None, 200, ""),
        ({"input": list(range(MAX_LEN + 1))}, "input", 400, "33 tokens"),
        ({"input": [[2], [10**6]]}, "input[1]", 400, "vocabulary"),
        ({"input": [[2], []]}, "input[1]", 400, "no tokens"),
        ({"input": ["x", [2]]}, "input", 400, "mixture"),
        ({"input": "x", "dimensions": 8}, "dimensions", 400, "one size"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", 400, "encoding_format"),
        ({"input": "\ud800"}, None, 400, ""),
        ({"input": "x", "stream": True}, "stream", 400, "not supported"),
        ({"query": "x"}, "input", 400, "input"),
    ],
)
async def test_what_is_refused_is_named(
    folders: dict[str, Path], tmp_path: Path, body: dict[str, Any], field: str | None, status: int, says: str
) -> None:
    async with open_client(folders["embedder"], tmp_path) as (client, service, model):
        answer = await client.post("/v1/embeddings", content=json.dumps({"model": model, **body}))
        assert answer.status_code == status, answer.text
        if status == 400:
            error = answer.json()["error"]
            assert error["param"] == field or field is None
            assert says in error["message"]
            assert not await rows(service)


async def test_dimensions_of_a_model_that_was_trained_so(tmp_path: Path) -> None:
    folder = tmp_path / "matryoshka"
    folder.mkdir()
    tiny_bert(folder, is_matryoshka=True)
    async with open_client(folder, tmp_path) as (client, _, model):
        body = {"model": model, "input": "x"}
        assert (
            len((await client.post("/v1/embeddings", json=body | {"dimensions": 8})).json()["data"][0]["embedding"])
            == 8
        )
        for too_many in (33, 1 << 70):
            answer = await client.post("/v1/embeddings", json=body | {"dimensions": too_many})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "dimensions"


async def test_tasks_are_not_confused(folders: dict[str, Path], tmp_path: Path) -> None:
    async with open_client(folders["embedder"], tmp_path) as (client, service, model):
        chat = {"model": model, "messages": [{"role": "user", "content": "x"}]}
        answer = await client.post("/v1/chat/completions", json=chat)
        assert answer.status_code == 400
        assert "/v1/embeddings" in answer.json()["error"]["message"]
        ranked = await client.post("/v1/rerank", json={"model": model, "query": "a", "documents": ["b"]})
        assert ranked.status_code == 400
        assert "no reranker" in ranked.json()["error"]["message"]
        with pytest.raises(BadInput):
            async for _ in service.run(Work(GenerateRequest(id="g", model=model, prompt="x"), Principal("a"))):
                pass
        with pytest.raises(Forbidden):
            await result_of(
                service.run(Work(EncodeRequest(id="f", model=model, texts=("x",)), Principal("a", models=("other",))))
            )


def pair_logits(folder: Path, query: str, text: str) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    ids = torch.tensor([ids_of(query, text)])
    types = torch.zeros_like(ids)
    types[0, len(ids_of(query)) :] = 1
    with torch.no_grad():
        return model(input_ids=ids, token_type_ids=types).logits[0]


async def test_reranker(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders["reranker"]
    texts = ["cat", "dog", "zebra"]
    scores = [torch.sigmoid(pair_logits(folder, "cow", text)).item() for text in texts]
    best = sorted(range(3), key=lambda index: -scores[index])
    async with open_client(folder, tmp_path) as (client, service, model):
        asked = {"model": model, "query": "cow", "documents": ["cat", {"text": "dog"}, "zebra"], "top_n": 2}
        jina = (await client.post("/v1/rerank", json=asked)).json()
        assert [result["index"] for result in jina["results"]] == best[:2]
        assert jina["results"][0]["document"] == {"text": texts[best[0]]}
        assert jina["results"][0]["relevance_score"] == pytest.approx(scores[best[0]], abs=TOLERANCE)
        cohere = (await client.post("/v2/rerank", json=asked)).json()
        assert cohere["results"][0].keys() == {"index", "relevance_score"}
        contexts = {"query": "cow", "contexts": [{"text": text} for text in texts], "top_k": 1}
        native = (await client.post(f"/client/v4/accounts/a/ai/run/{model}", json=contexts)).json()["result"]
        assert native["response"] == [{"id": best[0], "score": pytest.approx(scores[best[0]], abs=TOLERANCE)}]
        refused = await client.post("/v1/embeddings", json={"model": model, "input": "x"})
        assert refused.status_code == 400
        assert "/v1/rerank" in refused.json()["error"]["message"]
        assert service.models.find(model, None).task == TEXT_CLASSIFICATION


async def test_classifier(folders: dict[str, Path], tmp_path: Path) -> None:
    async with open_client(folders["classifier"], tmp_path) as (client, service, model):
        refused = await client.post("/v1/embeddings", json={"model": model, "input": "x"})
        assert refused.status_code == 400
        assert "makes no vectors" in refused.json()["error"]["message"]
        assert not await rows(service), "nothing was computed, so nothing is billed"
        run = f"/client/v4/accounts/a/ai/run/{model}"
        one = (await client.post(run, json={"text": "nice"})).json()["result"]
        assert {entry["label"] for entry in one} == set(LABELS.values())
        assert sum(entry["score"] for entry in one) == pytest.approx(1, abs=1e-5)
        assert one == sorted(one, key=lambda entry: -entry["score"])
        two = (await client.post(run, json={"text": ["nice", "bad"]})).json()["result"]
        assert [entry["label"] for entry in two[0]] == [entry["label"] for entry in one]
        assert len(two) == 2


async def test_requests_move_from_a_lost_engine(folders: dict[str, Path], tmp_path: Path) -> None:
    """The engine that gets the request first loses its connection in the middle of the step."""
    folder = folders["embedder"]
    engines = [EncoderThread(folder, tmp_path / f"{name}.sock", name) for name in ("e0", "e1")]
    lost: list[str] = []

    def breaking(engine: EncoderThread) -> None:
        compute = engine.model.hidden

        def hidden(texts: PackedTexts) -> torch.Tensor:
            if not lost:
                lost.append(engine.endpoint.name)
                engine.server.disconnect("r")
            return compute(texts)

        engine.model.hidden = hidden  # type: ignore[method-assign]

    for engine in engines:
        breaking(engine)
    service = await open_service([served(folder, *engines)], data_dir=tmp_path)
    assert await service.ready(60)
    encoded = await result_of(
        service.run(Work(EncodeRequest(id="r", model=folder.name, texts=("abc",)), Principal("a")))
    )
    assert lost
    assert encoded.n_rows == 1
    row = await row_of(service, EncodeRequest(id="r", model="x"))
    assert (row.status, row.input_tokens) == ("finished", len(ids_of("abc")))
    await service.close()


async def test_many_clients_and_a_long_list(folders: dict[str, Path], tmp_path: Path) -> None:
    """The clients come while the list is computed, and have their answers before the rest of it is."""
    folder, n_clients, n_texts = folders["embedder"], 40, 2048
    engine = EncoderThread(folder, tmp_path / "e.sock")
    begun, all_there, answered = threading.Event(), threading.Event(), threading.Event()
    compute, n_of_clients = engine.model.hidden, 0

    def hidden(texts: PackedTexts) -> torch.Tensor:
        nonlocal n_of_clients
        begun.set()
        assert all_there.wait(PATIENCE_S)
        if n_of_clients == n_clients:
            answered.wait(PATIENCE_S)
        n_of_clients += sum(n != len(ids_of("abc def")) for n in texts.lens)
        return compute(texts)

    engine.model.hidden = hidden  # type: ignore[method-assign]
    service = await open_service([served(folder, engine)], data_dir=tmp_path)
    assert await service.ready(60)
    assert isinstance(service.core, LocalCore)

    async def ask(name: str, texts: tuple[str, ...]) -> int:
        try:
            request = EncodeRequest(id=name, model=folder.name, texts=texts)
            return (await result_of(service.run(Work(request, Principal(name))))).n_rows
        except EmberlineError as error:
            raise AssertionError(error.message) from error

    whole = asyncio.create_task(ask("list", ("abc def",) * n_texts))
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    clients = [asyncio.create_task(ask(f"c{n}", ("x" * (n % 5 + 1),))) for n in range(n_clients)]
    async with asyncio.timeout(PATIENCE_S):
        while len(list(service.core.admission.balancer.ledger)) <= n_clients:
            await asyncio.sleep(0.001)
    all_there.set()
    assert await asyncio.gather(*clients) == [1] * n_clients
    assert not whole.done()  # others did not wait for it
    answered.set()
    assert await whole == n_texts
    assert await rows(service) == n_clients + 1
    await service.close()


async def test_num_ctx_cuts_texts_as_in_ollama(folders: dict[str, Path], tmp_path: Path) -> None:
    async with open_client(folders["embedder"], tmp_path) as (client, _, model):

        async def embed(text: str, num_ctx: int | None = None, **fields: Any) -> httpx.Response:
            body = {"model": model, "input": text, "options": {"num_ctx": num_ctx}} | fields
            return await client.post("/api/embed", json=body)

        target = (await embed("a")).json()
        for limit, text in ((1, "a bc"), (3, "a bc"), (4, "a"), (0, "a")):  # a text of its own is always kept
            found = (await embed(text, limit)).json()
            assert found["embeddings"] == target["embeddings"], limit
            assert found["prompt_eval_count"] == len(ids_of("a"))
            old_form = {"model": model, "prompt": text, "options": {"num_ctx": limit}}
            assert (await client.post("/api/embeddings", json=old_form)).json()["embedding"] == target["embeddings"][0]
        refused = await embed("a bc", 3, truncate=False)
        assert refused.status_code == 400
        assert "exceeds maximum context length" in refused.json()["error"]
