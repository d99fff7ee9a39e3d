"""Clients that are libraries: each asks a question whole and streamed, and calls a tool where it knows tools."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ANSWER, HERE, TEXT, Run, last_json

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


def javascript(run: Run, node: Path, installed: Path, client: str, server: str) -> Any:
    shutil.copy(HERE / "drive.mjs", installed)  # node resolves modules from the folder of the script
    return last_json(run(node, "drive.mjs", client, server))


def python(run: Run, installed: Path, client: str, server: str, **more: str) -> Any:
    return last_json(run(installed / "python" / "bin" / "python", HERE / "drive.py", client, server, **more))


@pytest.mark.parametrize("client", ["@ai-sdk/openai-compatible", "workers-ai-provider"])
def test_vercel_ai_sdk(run: Run, node: Path, installed: Path, server: str, client: str) -> None:
    found = javascript(run, node, installed, client, server)
    assert found["text"] == "".join(found["pieces"]) == TEXT
    assert len(found["pieces"]) > 3
    assert found["usage"] > 3
    assert found["ran"] == [{"city": "Bern"}]
    assert (found["answer"], found["finish"]) == (ANSWER, ["tool-calls", "stop"])


def test_openai(run: Run, node: Path, installed: Path, server: str) -> None:
    found = javascript(run, node, installed, "openai", server)
    assert found["text"] == "".join(found["pieces"]) == found["response"] == TEXT
    assert found["models"] == [MODEL]


def test_cloudflare(run: Run, node: Path, installed: Path, server: str) -> None:
    found = javascript(run, node, installed, "cloudflare", server)
    assert (found["text"], found["models"], found["error"]) == (TEXT, [MODEL], 5007)


def test_ollama(run: Run, installed: Path, server: str) -> None:
    found = python(run, installed, "ollama", server)
    assert found["text"] == found["generated"] == "".join(found["pieces"]) == TEXT
    assert len(found["pieces"]) > 3
    n_prompt, n_output, done_reason = found["counts"]
    assert (n_prompt > 10, n_output > 3, done_reason) == (True, True, "stop")
    assert (found["calls"], found["answer"]) == ([["weather", {"city": "Bern"}]], ANSWER)
    assert found["models"] == found["running"] == [MODEL]
    assert (found["capabilities"], found["pulled"]) == (["completion", "tools"], "success")
    assert found["missing"].startswith("404: ")


def test_litellm(run: Run, installed: Path, server: str) -> None:
    found = python(run, installed, "litellm", server, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert found.keys() == {"cloudflare", "openai", "ollama"}
    for answer in found.values():
        assert answer["text"] == "".join(answer["pieces"]) == TEXT
        assert answer["tokens"] > 3


def test_langchain_cloudflare(run: Run, installed: Path, server: str) -> None:
    found = python(run, installed, "langchain-cloudflare", server)
    assert found["text"] == "".join(found["pieces"]) == TEXT
    assert found["tokens"] > 3
    assert found["calls"] == [["weather", {"city": "Bern"}]]


def test_wrangler_lists_models(run: Run, node: Path, installed: Path, server: str) -> None:
    wrangler = installed / "node_modules" / "wrangler" / "bin" / "wrangler.js"
    account = {"CLOUDFLARE_ACCOUNT_ID": "acme", "CLOUDFLARE_API_TOKEN": "none"}
    base = {"CLOUDFLARE_API_BASE_URL": f"{server}/client/v4"}
    printed = run(node, wrangler, "ai", "models", "list", "--json", **account, **base)
    assert [model["name"] for model in json.loads(printed)] == [MODEL]
    schema = json.loads(run(node, wrangler, "ai", "models", "schema", MODEL, **account, **base))
    assert "messages" in schema["input"]["properties"]
