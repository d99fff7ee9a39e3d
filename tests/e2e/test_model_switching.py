"""Two models with real engines where there is room for one: nothing is cut under load, queued work gets its turn."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

N_TOKENS = 24
SWITCH_AFTER_S = 1.0
PATIENCE_S = 240.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`emberline serve` with the same weights under two names, each an engine process of its own."""
    home = tmp_path_factory.mktemp("switching")
    (home / "models").mkdir()
    (home / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    (home / "other.gguf").symlink_to(smollm2)
    words = ["serve", "smollm2", str(home / "other.gguf"), "--port", "0", "--json", "--kv-bytes", "128M"]
    settings = {
        "EMBERLINE_HOME": str(home),
        "EMBERLINE_MODELS_MAX_LOADED": "1",
        "EMBERLINE_MODELS_SWITCH_AFTER_S": str(SWITCH_AFTER_S),
        "EMBERLINE_MODELS_BATCH_SWITCH_AFTER_S": "3",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "emberline.cli.main", *words, "--http-workers", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **settings},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield json.loads(line)["url"]
    process.terminate()
    assert process.wait(60) == 0


async def complete(client: httpx.AsyncClient, model: str) -> tuple[str, float]:
    """The text, and how long its first token took."""
    body = {"model": model, "prompt": "The sky is", "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True}
    began_s, first_s, text, finish = time.monotonic(), 0.0, "", None
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_s = first_s or time.monotonic() - began_s
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text, finish = text + choice["text"], choice["finish_reason"] or finish
    assert finish == "length", "the stream was cut"
    return text, first_s


async def states(client: httpx.AsyncClient) -> dict[str, Any]:
    return {model["id"]: model["state"] for model in (await client.get("/api/ps")).json()["model_states"]}


async def test_two_models_take_turns_under_load(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        until_s = time.monotonic() + 12.0
        texts: dict[str, set[str]] = {"smollm2": set(), "other": set()}
        n_done = dict.fromkeys(texts, 0)

        async def ask_again_and_again(model: str) -> None:
            while time.monotonic() < until_s:
                text, _ = await complete(client, model)
                texts[model].add(text)
                n_done[model] += 1

        await asyncio.gather(*(ask_again_and_again(model) for model in texts for _ in range(3)))
        assert min(n_done.values()) >= 3
        assert texts["smollm2"] == texts["other"], "the same weights, whatever is loaded beside"
        assert len(texts["other"]) == 1
        assert sorted((await states(client)).values()) in (["loaded", "on_disk"], ["on_disk", "unloading"])


async def test_a_queued_job_has_its_model_loaded_while_another_is_busy(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        await client.post("/api/models/load", json={"model": "smollm2"})
        run = "/client/v4/accounts/a/ai/run/@local/models/other"
        queued = await client.post(run, params={"queueRequest": "true"}, json={"prompt": "Hello", "max_tokens": 4})
        job = queued.json()["result"]["request_id"]
        ended = False
        async with asyncio.timeout(PATIENCE_S):
            while not ended:  # smollm2 is never idle
                await asyncio.gather(complete(client, "smollm2"), complete(client, "smollm2"))
                polled = (await client.post(run, json={"request_id": job})).json()["result"]
                ended = polled.get("status") not in ("queued", "running")
        assert polled["responses"][0]["success"], polled
