"""Chat with a model in the terminal, or answer one prompt given as arguments or on stdin."""

import argparse
import sys

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.http_client import Address, Timing
from emberline.cli.server_target import server
from emberline.cli.terminal import Prompt, printable
from emberline.protocol.errors import EmberlineError

HELP = """  /clear   forget the conversation
  /exit    leave (Ctrl-D does too)
  /help    this list
  \"\"\"      begin and end a text of several lines
  Ctrl-C   stop the answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="the prompt; without one, what comes on stdin, or a chat")
    parser.add_argument("-m", "--model", help="model id, path or hf:org/repo (default: what the server has)")
    parser.add_argument("-s", "--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, help="longest answer")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.6,
        help="0: always the likeliest token (default 0.6)",
    )
    parser.add_argument("--seed", type=int, help="make the answer repeatable")
    parser.add_argument("-v", "--verbose", action="store_true", help="print tokens and rates after each answer")
    common.add_address(parser)
    common.add_data(parser)


def run(args: argparse.Namespace) -> int:
    question = " ".join(args.prompt)
    if not sys.stdin.isatty():
        question = "\n\n".join(filter(None, [question, sys.stdin.read().strip()]))
        if not question:
            print("emberline run: the prompt is empty; give one as an argument or on stdin", file=sys.stderr)
            return 2
    with server(args) as (address, model):
        chat = Chat(address, model, args)
        if question:
            return chat.answer(question)
        return chat.interact()


class Chat:
    """The conversation so far, and what each answer is asked with."""

    def __init__(self, address: Address, model: str, args: argparse.Namespace) -> None:
        self.address = address
        self.verbose = args.verbose
        self.data_folder = common.config_of(args).home
        self.first = [{"role": "system", "content": args.system}] if args.system else []
        self.messages = list(self.first)
        options = {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed}
        self.options = {"model": model, **{name: value for name, value in options.items() if value is not None}}

    def answer(self, question: str) -> int:
        """Print the answer as it comes. Ctrl-C ends the answer, and what was said of it stays in the conversation."""
        self.messages.append({"role": "user", "content": question})
        timing, said, status = Timing(), [], 0
        pieces = client.chat(self.address, {**self.options, "messages": self.messages}, timing)
        try:
            for piece in pieces:
                said.append(piece)
                sys.stdout.write(printable(piece) if sys.stdout.isatty() else piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            status = 130
        finally:
            pieces.close()
        print()
        self.messages.append({"role": "assistant", "content": "".join(said)})
        if self.verbose:
            print(_figures(timing), file=sys.stderr)
        return status

    def interact(self) -> int:
        prompt = Prompt(self.data_folder / "history")
        print(f"{self.options['model']} at {self.address.url}. /help lists the commands.")
        for line in prompt.lines():
            if line in ("/exit", "/quit", "/bye"):
                break
            if line == "/clear":
                self.messages = list(self.first)
                print("The conversation is forgotten.")
            elif line.startswith("/"):
                print(HELP if line in ("/help", "/?") else f"There is no command {line.split()[0]}.\n{HELP}")
            else:
                self._try_to_answer(line)
        return 0

    def _try_to_answer(self, question: str) -> None:
        before = list(self.messages)
        try:
            self.answer(question)
        except EmberlineError as error:
            self.messages = before
            print(f"emberline: {error.message}", file=sys.stderr)


def _figures(timing: Timing) -> str:
    answer = f"{timing.output_tokens} tokens at {timing.tokens_per_s:.1f}/s"
    prompt = f"{timing.prompt_tokens} in the prompt ({timing.cached_tokens} cached)"
    return f"{answer}, the first after {timing.first_token_s * 1e3:.0f} ms; {prompt}"
