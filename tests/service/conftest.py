import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from emberline.catalog.model_card import ModelCard, PathSource
from emberline.protocol import token_ids as tokens
from emberline.protocol.request import Principal
from emberline.service import Served, Service, open_service
from emberline.text.grammar.compiler_pool import GrammarCompiler
from emberline.text.text_model import TextModel
from tests.service.fake_engine import EOS, FakeEngine, Script

MODEL = "@cf/test/bytes"
ALICE = Principal("alice", "", b"a" * 16)
PATIENCE_S = 60.0
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A tokenizer with a token per byte, and a plain chat template, read from files as any model's."""
    return byte_model(tmp_path_factory.mktemp("bytes-model"))


def byte_model(folder: Path, more_special: Sequence[str] = ()) -> TextModel:
    """Write such a model's files into a folder, with more special tokens, and read them."""
    special = ["<unk>", "<|start|>", "<|end|>"]
    assert special[EOS] == "<|end|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: number for number, name in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = (*special, *more_special)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|end|>"}))
    return TextModel.load(folder)


@pytest.fixture
def say(text_model: TextModel) -> Callable[..., Script]:
    """A script that says a text, one byte a token, and ends."""

    def make(text: str, *, end: bool = True) -> Script:
        ids = tokens.unpack(text_model.encode(text, special=False))
        return lambda request: [*ids, *([EOS] if end else [])]

    return make


@pytest.fixture
async def engine(tmp_path: Path, say: Callable[..., Script]) -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine(tmp_path / "e0.sock", say("Hello!")).start()
    yield engine
    await engine.die()


def offer(text_model: TextModel, *engines: FakeEngine) -> Served:
    card = ModelCard(
        id=MODEL,
        aliases=("bytes",),
        description="",
        author="test",
        context_window=256,
        source=PathSource(""),
        created_at="2026-11-19 00:00:00.000",
    )
    return Served(card, text_model, tuple(engine.endpoint for engine in engines))


class SharedGrammars(GrammarCompiler):
    """A compiler of grammars that several services use in turn, so that its processes start once."""

    async def close(self) -> None:
        """Do nothing: services close theirs."""

    async def end(self) -> None:
        await super().close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grammars() -> AsyncIterator[GrammarCompiler]:
    """A compiler for the services of a module whose tests share an event loop."""
    shared = SharedGrammars()
    yield shared
    await shared.end()


Opener = Callable[..., Awaitable[Service]]


@pytest.fixture
async def open_one(tmp_path: Path, text_model: TextModel) -> AsyncIterator[Opener]:
    """Opens a service over engines, waits for them, and closes it after the test."""
    opened: list[Service] = []

    async def make(*engines: FakeEngine, **options: Any) -> Service:
        service = await open_service([offer(text_model, *engines)], data_dir=tmp_path / "data", **options)
        opened.append(service)
        assert await service.ready(PATIENCE_S)
        return service

    yield make
    for service in opened:
        await service.close()


@pytest.fixture
async def service(engine: FakeEngine, open_one: Opener) -> Service:
    return await open_one(engine)
