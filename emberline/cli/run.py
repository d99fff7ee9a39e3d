"""`emberline run [MODEL] [PROMPT…]`: chat in the terminal, or answer one prompt from the arguments or stdin."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from emberline.catalog.model_card import BUILT_IN, DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import names
from emberline.cli import common
from emberline.cli.chat import ChatSession, read_image
from emberline.cli.server_target import served_names, server
from emberline.protocol.errors import BadInput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "emberline run [options] [MODEL] [PROMPT ...]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT ...]",
        help="a model (name, path or hf:org/repo; default: the server's), a prompt in quotes, else stdin or a chat",
    )
    parser.add_argument("-s", "--system", help="system prompt")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="an image to ask about; may be repeated"
    )
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, help="0: greedy decoding (default: the model's)")
    parser.add_argument("--seed", type=int, help="make the answer repeatable")
    parser.add_argument("-v", "--verbose", action="store_true", help="print token counts and rates after each answer")
    common.add_address(parser)
    common.add_data_dir(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    served = served_names(config, required=common.names_server(args, config))
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    model, prompt = split_words(args.words, _model_names(config.home, [*served]), has_input=bool(piped))
    prompt = "\n\n".join(filter(None, [prompt, piped]))
    if not prompt and not sys.stdin.isatty():
        print("emberline run: the prompt is empty; give one as an argument or on stdin", file=sys.stderr)
        return 2
    for name in args.image:
        read_image(name)  # a file that is not there is reported before a server is started
    with server(config, model, served, required=common.names_server(args, config)) as (address, model_id):
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
        chat = ChatSession(address, model_id, options, args.system, config.home / "history", verbose=args.verbose)
        for name in args.image:
            chat.attach(name)
        return chat.answer(prompt) if prompt else chat.interact()


def split_words(words: Sequence[str], names: Sequence[str], has_input: bool = False) -> tuple[str | None, str]:
    """(model or None for the default, prompt). The first word is the model: one of `names`, a path or a Hugging Face
    repository.

    A prompt in quotes goes to the default model; so does a single word that resembles no model if text on stdin follows
    (`has_input`). Raises BadInput for any other word that names no model.
    """
    if not words:
        return None, ""
    first, rest = words[0], words[1:]
    if first.lower().removesuffix(":latest") in names or first.startswith("hf:") or _is_model_path(first):
        return first, " ".join(rest)
    similar = difflib.get_close_matches(first.lower(), names, n=3)
    if any(character.isspace() for character in first) or (has_input and not rest and not similar):
        return None, " ".join(words)
    model = similar[0] if similar else _alias(DEFAULT_MODEL)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else "."
    raise BadInput(
        f"there is no model {first!r}{hint} `emberline ls` lists those on this machine, `emberline pull hf:org/repo` "
        f'adds one. To send it as a prompt: emberline run {model} "{" ".join(words)}"'
    )


def _model_names(home: Path, served: Sequence[str]) -> list[str]:
    """Ids and aliases of the models that can be pulled, of the installed and of the served ones, in lower case, the
    aliases first. A name with Ollama's `:latest` is one as well."""
    store = ModelStore(home)
    installed = [entry.card for entry in store.entries()]
    known = [*names(store), *(name for card in installed for name in (*card.aliases, card.id)), *served]
    found = dict.fromkeys(name.lower() for name in known)
    return sorted(found, key=lambda name: name.startswith("@"))


def _alias(model: str) -> str:
    return next((card.aliases[0] for card in BUILT_IN if card.id == model), model)


def _is_model_path(word: str) -> bool:
    explicit = word.startswith(("/", "./", "../", "~/")) or word.endswith(".gguf")
    return (explicit and " " not in word) or Path(word, "config.json").is_file()
