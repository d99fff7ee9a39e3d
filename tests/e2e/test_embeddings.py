"""The real embedding model beside a chat model, as a user would serve them, with openai's client."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from tests.conftest import pulled
from tests.e2e.test_examples import ROOT, run
from tests.lazy_modules import openai, transformers

pytestmark = pytest.mark.slow
MODEL = "@cf/sentence-transformers/all-minilm-l6-v2"
PROSE = (ROOT / "tests/models/prose.txt").read_text().split()
TEXTS = [" ".join(PROSE[at : at + length]) for at, length in ((0, 3), (40, 12), (90, 60), (200, 150))]


@pytest.fixture(scope="module")
def minilm() -> Path:
    return pulled(MODEL)


@pytest.fixture(scope="module")
def both(smollm2: Path, minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The base URL of a server with a chat model and an embedding model."""
    home = tmp_path_factory.mktemp("both")
    (home / "models").mkdir()
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    (home / "models" / minilm.name).symlink_to(minilm)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "smollm2", MODEL, "--port", "0", "--json"]
    env = {**os.environ, "EMBERLINE_HOME": str(home)}
    process = subprocess.Popen([*command, "--kv-bytes", "128M"], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield json.loads(line)["url"]
    process.terminate()
    assert process.wait(30) == 0


def test_vectors_equal_those_of_transformers(both: str, minilm: Path) -> None:
    client = openai.OpenAI(base_url=f"{both}/v1", api_key="none")
    found = client.embeddings.create(model="minilm", input=TEXTS)  # asked for in base64
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    model = transformers.AutoModel.from_pretrained(minilm).eval()
    n_tokens = 0
    for text, item in zip(TEXTS, found.data, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        n_tokens += ids.shape[1]
        with torch.no_grad():
            expected = torch.nn.functional.normalize(model(input_ids=ids).last_hidden_state[0].mean(0), dim=0)
        np.testing.assert_allclose(item.embedding, expected, atol=1e-3, rtol=0)
    assert found.usage.prompt_tokens == n_tokens


def test_chat_and_embeddings_side_by_side(both: str) -> None:
    with httpx.Client(base_url=both, timeout=60) as client:
        messages = [{"role": "user", "content": "Say hello."}]
        chat = client.post("/v1/chat/completions", json={"model": "smollm2", "messages": messages, "max_tokens": 4})
        assert chat.json()["usage"]["completion_tokens"] == 4
        run_url = f"/client/v4/accounts/a/ai/run/{MODEL}"
        native = client.post(run_url, json={"text": TEXTS[0]}).json()["result"]
        packed = {"model": MODEL, "input": TEXTS[0], "encoding_format": "base64"}
        raw = client.post("/v1/embeddings", json=packed).json()["data"][0]["embedding"]
        np.testing.assert_allclose(native["data"][0], np.frombuffer(base64.b64decode(raw), "<f4"), atol=1e-6)


def test_the_example(both: str) -> None:
    lines = run([sys.executable, str(ROOT / "examples/embeddings.py")], both).splitlines()
    assert "bakery" in max(lines)
