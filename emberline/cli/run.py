"""`emberline run [MODEL] [PROMPT…]`: chat in the terminal, or answer one prompt from the arguments or stdin."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from emberline.catalog.model_card import BUILT_IN, DEFAULT_MODEL
from emberline.catalog.model_store import ModelStore
from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.http_client import ChatTiming, ServerAddress
from emberline.cli.server_target import server
from emberline.cli.terminal import LineReader, printable
from emberline.protocol.errors import BadInput, EmberlineError

HELP = """  /clear   forget the conversation
  /exit    leave (Ctrl-D does too)
  /help    this list
  \"\"\"      begin and end a text of several lines
  Ctrl-C   stop the answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "emberline run [options] [MODEL] [PROMPT ...]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT ...]",
        help="a model (name, path or hf:org/repo; default: the server's) and a prompt; without one, stdin or a chat",
    )
    parser.add_argument("-s", "--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument("--temperature", type=float, default=0.6, help="0: greedy decoding (default 0.6)")
    parser.add_argument("--seed", type=int, help="make the answer repeatable")
    parser.add_argument("-v", "--verbose", action="store_true", help="print token counts and rates after each answer")
    common.add_address(parser)
    common.add_data_dir(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    served = client.served_models(ServerAddress.of(config))
    piped = "" if sys.stdin.isatty() else sys.stdin.read().strip()
    model, prompt = split_words(args.words, _model_names(config.home, served), has_input=bool(piped))
    prompt = "\n\n".join(filter(None, [prompt, piped]))
    if not prompt and not sys.stdin.isatty():
        print("emberline run: the prompt is empty; give one as an argument or on stdin", file=sys.stderr)
        return 2
    with server(config, model, served) as (address, model_id):
        chat = ChatSession(address, model_id, args, config.home / "history")
        return chat.answer(prompt) if prompt else chat.interact()


def split_words(words: Sequence[str], names: Sequence[str], has_input: bool = False) -> tuple[str | None, str]:
    """(model or None for the default, prompt). The first word is the model if it names one of `names`, a path or a
    Hugging Face repository. One word that names none could be a misspelt model, so it is not taken for a prompt;
    unless text on stdin follows (`has_input`) and no model has a similar name.
    """
    if not words:
        return None, ""
    first = words[0]
    if first.lower() in names or first.startswith("hf:") or _is_model_path(first):
        return first, " ".join(words[1:])
    if len(words) > 1 or any(character.isspace() for character in first):
        return None, " ".join(words)
    similar = difflib.get_close_matches(first.lower(), names, n=1)
    if has_input and not similar:
        return None, first
    model = similar[0] if similar else _alias(DEFAULT_MODEL)
    hint = f"; did you mean {model}?" if similar else "; `emberline ls` lists those on this machine."
    raise BadInput(f'there is no model {first!r}{hint} To send it as a prompt: emberline run {model} "{first}"')


def _model_names(home: Path, served: Sequence[str]) -> list[str]:
    """Ids and aliases of the built-in, installed and served models, in lower case, the aliases first."""
    cards = [*BUILT_IN, *(entry.card for entry in ModelStore(home).entries())]
    aliases = [alias for card in cards for alias in card.aliases]
    return [name.lower() for name in dict.fromkeys([*aliases, *(card.id for card in cards), *served])]


def _alias(model: str) -> str:
    return next((card.aliases[0] for card in BUILT_IN if card.id == model), model)


def _is_model_path(word: str) -> bool:
    explicit = word.startswith(("/", "./", "../", "~/")) or word.endswith(".gguf")
    return (explicit and " " not in word) or Path(word, "config.json").is_file()


class ChatSession:
    """One conversation and its sampling options."""

    def __init__(self, address: ServerAddress, model: str, args: argparse.Namespace, history: Path) -> None:
        self._address = address
        self._verbose = args.verbose
        self._history = history
        self._system = [{"role": "system", "content": args.system}] if args.system else []
        self._messages = list(self._system)
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
        self._options = {"model": model, **{name: value for name, value in options.items() if value is not None}}

    def answer(self, prompt: str) -> int:
        """Print the answer as it streams. Ctrl-C ends it; the partial answer stays in the conversation."""
        self._messages.append({"role": "user", "content": prompt})
        timing, received, status = ChatTiming(), [], 0
        deltas = client.chat(self._address, {**self._options, "messages": self._messages}, timing)
        try:
            for text in deltas:
                received.append(text)
                sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            status = 130
        finally:
            deltas.close()
        print()
        self._messages.append({"role": "assistant", "content": "".join(received)})
        if self._verbose:
            print(_summary(timing), file=sys.stderr)
        return status

    def interact(self) -> int:
        print(f"{self._options['model']} at {self._address.url}. /help lists the commands.")
        for line in LineReader(self._history).lines():
            if line in ("/exit", "/quit", "/bye"):
                break
            if line == "/clear":
                self._messages = list(self._system)
                print("The conversation is forgotten.")
            elif line.startswith("/"):
                print(HELP if line in ("/help", "/?") else f"There is no command {line.split()[0]}.\n{HELP}")
            else:
                before = list(self._messages)
                try:
                    self.answer(line)
                except EmberlineError as error:
                    self._messages = before
                    print(f"emberline: {error.message}", file=sys.stderr)
        return 0


def _summary(timing: ChatTiming) -> str:
    answer = f"{timing.output_tokens} tokens at {timing.tokens_per_s:.1f}/s"
    prompt = f"{timing.prompt_tokens} in the prompt ({timing.cached_tokens} cached)"
    return f"{answer}, TTFT {timing.ttft_s * 1e3:.0f} ms; {prompt}"
