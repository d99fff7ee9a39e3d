"""Emberline as a server under comparison, and its tokenizer, which counts prompt tokens."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.contender import THREADS, Contender, Setup
from benchmarks.prompts import Message, Prompts, single_token_words
from benchmarks.report import OURS
from emberline import __version__
from emberline.catalog.model_card import DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.config import home_dir
from emberline.protocol.request import Message as ChatMessage
from emberline.text.text_model import TextModel

PromptsOf = Callable[[str], Prompts]


def default_gguf() -> Path:
    """The catalog's default model, downloaded if needed."""
    return pull(DEFAULT_MODEL, ModelStore(home_dir(os.environ))).path


def contender(setup: Setup) -> Contender:
    """`emberline serve` with defaults and its own data folder."""
    data = setup.cache / "emberline-data"
    card = pull(str(setup.gguf), ModelStore(data)).card

    def command(port: int, streams: int) -> list[str]:
        flags = ["--port", str(port), "--data-dir", str(data), "--threads", str(THREADS)]
        return [sys.executable, "-m", "emberline.cli.main", "serve", card.id, *flags]

    return Contender(OURS, f"emberline {__version__}, this checkout", card.id, command)


def prompts_of(gguf: Path, seed: str) -> Callable[[str], Prompts]:
    """A source of prompts by name: the same name gives the same prompts to every server."""
    text = TextModel.load(gguf)
    words = single_token_words(text)

    def count(messages: Sequence[Message]) -> int:
        chat = [ChatMessage(role=m["role"], content=m["content"]) for m in messages]  # type: ignore[arg-type]
        return len(text.encode(text.render(chat), special=True)) // 4

    return lambda name: Prompts(words, count, f"{seed} {name}")
