"""`emberline serve` with several ranks, over HTTP: the text of one rank, and disaggregation between rank groups."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROMPTS = ["Tell me of the sea.", "A list of ships, and where each of them went in the year of the storm, with names."]


@contextmanager
def serving(model: Path, home: Path, *flags: str) -> Iterator[str]:
    """The base URL of a server of its own."""
    command = [sys.executable, "-m", "emberline.cli.main", "serve", str(model), "--port", "0", "--json"]
    common = ["--device", "cpu", "--kv-bytes", "16M", "--threads", "2", "--speculation", "off"]
    env = {**os.environ, "EMBERLINE_HOME": str(home)}
    process = subprocess.Popen([*command, *common, *flags], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the server did not start; its log is above"
        yield json.loads(line)["url"]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def ask(url: str, path: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def replies(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        name = json.load(answer)["data"][0]["id"]
    asked = {"model": name, "max_tokens": 24, "seed": 3}
    texts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.9):
            message = {"role": "user", "content": prompt}
            chat = ask(url, "/v1/chat/completions", messages=[message], temperature=temperature, **asked)
            texts.append(chat["choices"][0]["message"]["content"])
    shape = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    how = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": shape}}
    message = {"role": "user", "content": PROMPTS[0]}
    chat = ask(url, "/v1/chat/completions", messages=[message], response_format=how, temperature=0.0, **asked)
    texts.append(chat["choices"][0]["message"]["content"])
    assert set(json.loads(texts[-1])) == {"on"}
    return texts


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with serving(tiny_model, tmp_path_factory.mktemp("one")) as url:
        return replies(url)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--tp", "2"),
        ("--pp", "2", "--step-timeout", "300"),
        ("--tp", "2", "--prefill-workers", "1", "--decode-workers", "1"),
    ],
    ids=["tp2", "pp2", "tp2 apart"],
)
def test_ranks_reply_as_one_over_http(
    tiny_model: Path, expected: list[str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    with serving(tiny_model, tmp_path, *flags) as url:
        assert replies(url) == expected
        assert replies(url) == expected, "with the prompts in the prefix cache"
