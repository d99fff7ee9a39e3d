"""Images over HTTP: a real server and engine answer about a picture as transformers does."""

import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from PIL import Image

from emberline.protocol.token_ids import unpack
from emberline.text.image_pixels import image_pixels
from emberline.text.text_model import TextModel
from tests.engine.images.small_engine import Prompt, processor_of
from tests.images.files import encoded, picture
from tests.models.vision.small_vision_models import MODELS, save_vision_model
from tests.service.conftest import byte_model

FAMILY, N_TOKENS = "smolvlm", 6
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
SPECIAL = ["<image>", "<fake_token_around_image>", "<global-img>", *TILES]
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
RED, NOISE = picture(64, 64), Image.frombytes("RGB", (64, 64), Random(1).randbytes(3 * 64 * 64))


class Seeing(NamedTuple):
    url: str
    folder: Path
    text: TextModel
    reference: Any


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """`emberline serve` with a small random model of the SmolVLM family."""
    home = tmp_path_factory.mktemp("seeing")
    folder = home / "models" / "seeing"
    folder.mkdir(parents=True)
    text = byte_model(folder, SPECIAL)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (image_token,) = unpack(text.encode("<image>", special=True))
    language = MODELS[FAMILY]["text_config"] | {"vocab_size": text.vocab_size}
    reference = save_vision_model(folder, FAMILY, text_config=language, image_token_id=image_token)
    command = [
        sys.executable,
        "-m",
        "emberline.cli.main",
        "serve",
        str(folder),
        "--port",
        "0",
        "--json",
        "--kv-bytes",
        "16M",
    ]
    process = subprocess.Popen(
        [*command, "--threads", "1"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"EMBERLINE_HOME": str(home)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield Seeing(json.loads(line)["url"], folder, text, reference)
    process.terminate()
    assert process.wait(60) == 0


def content(*parts: Any) -> list[dict[str, Any]]:
    """Texts and pictures as parts of a chat message."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            found.append({"type": "text", "text": part})
        else:
            url = "data:image/png;base64," + base64.b64encode(encoded(part)).decode()
            found.append({"type": "image_url", "image_url": {"url": url}})
    return found


class Reply(NamedTuple):
    text: bytes  # of all tokens
    logprobs: list[float]
    usage: dict[str, Any]


def ask(seeing: Seeing, *parts: Any) -> Reply:
    """A greedy reply."""
    body = {"model": "seeing", "messages": [{"role": "user", "content": content(*parts)}]}
    body |= {"max_tokens": N_TOKENS, "temperature": 0, "logprobs": True, "ignore_eos": True}
    body["logit_bias"] = {str(processor_of(seeing.folder).image_token_id): -100}
    response = httpx.post(f"{seeing.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    reply = response.json()
    tokens = reply["choices"][0]["logprobs"]["content"]
    text = b"".join(bytes(token["bytes"]) for token in tokens)
    return Reply(text, [token["logprob"] for token in tokens], reply["usage"])


def expected(seeing: Seeing, *parts: Any) -> bytes:
    """The same reply from transformers, of an image prepared by the processor's plan."""
    processor = processor_of(seeing.folder)
    prompt = Prompt(seeing.folder, FAMILY, [])
    text = "user: "
    for part in parts:
        if isinstance(part, str):
            text += part
            continue
        plan = processor.plan(*part.size)
        prompt.add_pixels(plan.tile_sizes, image_pixels(part, plan))
        text += plan.text
    prompt.ids = list(unpack(seeing.text.encode(text, special=True)))
    ids = prompt.expected(seeing.reference, N_TOKENS)
    spelled = seeing.text.vocabulary.tokens
    return b"".join(spelled[token_id] for token_id in ids)


@pytest.mark.slow
def test_a_chat_about_pictures(seeing: Seeing) -> None:
    reply = ask(seeing, "What is this?", RED)
    assert reply.text == expected(seeing, "What is this?", RED)
    n_rows = 5 * 4  # four tiles and the whole
    assert reply.usage["prompt_tokens_details"]["image_tokens"] == n_rows
    other = ask(seeing, "What is this?", NOISE)
    assert other.text == expected(seeing, "What is this?", NOISE)
    assert max(abs(a - b) for a, b in zip(other.logprobs, reply.logprobs)) > 0.01  # it sees
    both = ask(seeing, RED, "and", NOISE, "differ?")
    assert both.text == expected(seeing, RED, "and", NOISE, "differ?")
    assert both.usage["prompt_tokens_details"]["image_tokens"] == 2 * n_rows
    again = ask(seeing, "What is this?", RED)
    assert again.text == reply.text
    assert again.usage["prompt_tokens_details"]["cached_tokens"] >= 16
    metrics = httpx.get(f"{seeing.url}/metrics").text
    found = [line for line in metrics.splitlines() if line.startswith("emberline_image_tiles_total")]
    assert [float(line.split()[-1]) for line in found] == [10, 15], found  # encoded, reused
