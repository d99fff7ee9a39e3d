"""`emberline draft train`: an EAGLE-3 draft head for a model, from replies that the model writes itself."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from emberline.catalog.model_store import ModelStore, looks_like_path
from emberline.cli import common
from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message

if TYPE_CHECKING:
    from emberline.text.text_model import TextModel

HELD_OUT = 64  # prompts that are kept back to measure with


class _Prompt(msgspec.Struct):
    """A line of JSON: a prompt, or a conversation in the form of OpenAI's API."""

    prompt: str | None = None
    messages: list[Message] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    train = actions.add_parser("train", help="train an EAGLE-3 head", allow_abbrev=False)
    add = train.add_argument
    add("model", metavar="MODEL", help="a model that is pulled, a GGUF file, or a checkpoint folder")
    add("--text", type=Path, nargs="+", required=True, metavar="FILE", help="prompts: a line each, or JSON lines")
    add("--held-out", type=Path, metavar="FILE", help=f"prompts to measure with (default: {HELD_OUT} of the others)")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where the head is written")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--draft-vocab", type=int, default=4096, metavar="N", help="token ids that the head can draft (default 4096)")
    add("--max-tokens", type=int, default=256, metavar="N", help="of a reply (default 256)")
    add("--length", type=int, default=320, metavar="N", help="tokens of a training sequence (default 320)")
    add("--steps", type=int, default=2000, metavar="N", help="of training (default 2000)")
    add("--batch", type=int, default=64, metavar="N", help="sequences in a step of training (default 64)")
    add("--learning-rate", type=float, default=1e-3, metavar="F", help="at its highest (default 0.001)")
    common.add_data_dir(train)
    common.add_json(train)


def run(args: argparse.Namespace) -> int:
    for name in ("draft_vocab", "max_tokens", "length", "steps", "batch"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} is at least 1", param=name)
    store = ModelStore(common.config_of(args).home)
    path = Path(args.model).expanduser() if looks_like_path(args.model) else store.resolve(args.model).path
    from emberline.text.text_model import TextModel

    text = TextModel.load(path)
    prompts = list(_prompts(args.text, text))
    held_out = list(_prompts([args.held_out], text)) if args.held_out else []
    if not held_out:
        prompts, held_out = prompts[HELD_OUT:], prompts[:HELD_OUT]
    if not prompts:
        raise BadInput(f"there are too few prompts to train with: give more than {HELD_OUT}", param="text")
    from emberline.engine.training.eagle_training import TrainingSettings
    from emberline.engine.training.head_training import train_head

    sizes = {name: getattr(args, name) for name in ("draft_vocab", "max_tokens", "length")}
    settings = TrainingSettings(steps=args.steps, batch=args.batch, learning_rate=args.learning_rate)
    result = train_head(path, prompts, held_out, args.out, args.device, settings, **sizes, say=_say)
    if args.json:
        common.print_json({"head": str(args.out), **result})
    else:
        print(f"{args.out}: {result['accepted'][-1]:.2f} tokens a verification on held-out prompts")
    return 0


def _prompts(files: Iterable[Path], text: "TextModel") -> Iterable[bytes]:
    """The token ids of each prompt, in the model's chat template."""
    for file in files:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file} cannot be read: {error}", param="text") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield text.encode(text.render(_conversation(line, f"{file}:{number}")), special=True)


def _conversation(line: str, where: str) -> list[Message]:
    if not line.startswith("{"):
        return [Message("user", line)]
    try:
        given = msgspec.json.decode(line, type=_Prompt)
    except msgspec.DecodeError as error:
        raise BadInput(f"{where}: {error}", param="text") from None
    if given.prompt is None and not given.messages:
        raise BadInput(f"{where}: a line of JSON has a `prompt` or `messages`", param="text")
    return given.messages or [Message("user", given.prompt or "")]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
