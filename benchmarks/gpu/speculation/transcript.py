"""A coding agent's session, recorded token by token: `python -m benchmarks.gpu.speculation.transcript GGUF`.

The model works on a small Python project with tools, asked for one change after the other by a user whose messages are
written down here: a tool call for each. It is served by the engine on this machine's CPU, with its own chat template,
the grammar of its tool calls and greedy draws; the tools run in a temporary folder. What it writes is left as it is.
The project's code has no double quotes, since small models do not escape them. Without GGUF this prints the session
that is in the tree, `benchmarks/data/coder_session.gz`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.gpu.speculation.engine import build
from benchmarks.gpu.speculation.inputs import CODER_SESSION, Session, ToolCall, read_session, write_session
from emberline.protocol.grammar import encode
from emberline.protocol.request import EngineRequest, GenerateRequest, Message, SamplingParams, Tool, ToolChoice
from emberline.protocol.request import ToolCall as Call
from emberline.protocol.token_ids import count, unpack
from emberline.service.sessions import Sessions
from emberline.text.grammar.reply_grammar import build as build_grammar
from emberline.text.prompt import build_prompt, chain_digests, grammar_spec, turn_entries
from emberline.text.text_model import TextModel
from emberline.text.tool_calls.parser import Reply

PROJECT = {
    "cart.py": """\
# A shopping cart.

TAX = 0.2


class Line:
    def __init__(self, name, price, quantity):
        self.name = name
        self.price = price
        self.quantity = quantity


class Cart:
    def __init__(self):
        self.lines = []
        self.discount = 0

    def add(self, name, price, quantity=1):
        for line in self.lines:
            if line.name == name:
                line.quantity += quantity
                return
        self.lines.append(Line(name, price, quantity))

    def set_discount(self, percent):
        self.discount = percent

    def subtotal(self):
        return sum(line.price for line in self.lines)

    def total(self):
        amount = self.subtotal()
        amount -= amount * self.discount / 100
        return round(amount * (1 + TAX), 2)

    def receipt(self):
        rows = [f'{line.quantity} x {line.name}' for line in self.lines]
        rows.append(f'total: {self.total()}')
        return ', '.join(rows)
""",
    "test_cart.py": """\
from cart import Cart


def test_add():
    cart = Cart()
    cart.add('pen', 2.0)
    cart.add('pen', 2.0, 2)
    assert [line.quantity for line in cart.lines] == [3]


def test_subtotal():
    cart = Cart()
    cart.add('pen', 2.0, 3)
    cart.add('book', 10.0)
    assert cart.subtotal() == 16.0


def test_total():
    cart = Cart()
    cart.add('book', 10.0)
    cart.set_discount(50)
    assert cart.total() == 6.0


def test_receipt():
    cart = Cart()
    cart.add('book', 10.0)
    assert cart.receipt() == '1 x book, total: 12.0'
""",
}
MAX_REPLY = 600  # tokens
KV_BYTES = 1 << 30
SHOWN = re.compile(
    r"E {3}\S|test_|FAILED|ERROR|\d+ (passed|failed|error)"
)  # of pytest's lines: those about the project
MAX_OUTPUT, TESTS_LIMIT_S = 1500, 60.0  # characters of a tool's result
SYSTEM = """\
You are a coding agent. You work on the Python project in the current folder. Do what the user asks for with one tool \
call.

A call is one line of JSON, with \\n for every new line of a file, for example: {"name": "write_file", "arguments": \
{"path":"lib.py","content":"import os\\n\\n\\ndef size(path):\\n    return os.path.getsize(path)\\n"}}"""


class Turn(NamedTuple):
    text: str  # of the user
    file: str = ""  # whose text is attached, as it is then


USER = (
    Turn("Read cart.py."),
    Turn("Run the tests."),
    Turn("In cart.py, subtotal has to sum line.price * line.quantity. Fix it and write the whole file.", "cart.py"),
    Turn("Run the tests again."),
    Turn("Add type hints to all methods of cart.py, and write the whole file.", "cart.py"),
    Turn("Rename set_discount to apply_discount in cart.py, and write the whole file.", "cart.py"),
    Turn("Replace set_discount by apply_discount in test_cart.py, and write the whole file.", "test_cart.py"),
    Turn("Run the tests again."),
    Turn("Add a method remove(self, name) behind add in cart.py, and write the whole file.", "cart.py"),
    Turn("Add a test of remove at the end of test_cart.py, and write the whole file.", "test_cart.py"),
    Turn("Run the tests again."),
)


def _tool(name: str, description: str, **parameters: str) -> Tool:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": [*parameters], "additionalProperties": False}
    return Tool(name, description, schema, strict=True)


TOOLS = (
    _tool("read_file", "Read a file.", path="of the file"),
    _tool("write_file", "Write a whole file.", path="of the file", content="all of its text"),
    _tool("str_replace", "Replace a text in a file.", path="of the file", old="occurs once in it", new="instead"),
    _tool("run_tests", "Run the project's tests with pytest."),
)


class Project:
    """The tools, in a folder of their own. What goes wrong is told to the model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def run(self, call: Call) -> str:
        try:
            arguments: dict[str, str] = msgspec.json.decode(call.arguments, type=dict[str, str])
            return str(getattr(self, f"_{call.name}")(**arguments))[:MAX_OUTPUT]
        except (msgspec.MsgspecError, OSError, ValueError, TypeError) as error:
            return f"error: {error}"

    def _path(self, path: str) -> Path:
        found = (self._folder / path).resolve()
        if not found.is_relative_to(self._folder):
            raise ValueError(f"{path} is outside the project")
        return found

    def read(self, path: str) -> str:
        return self._path(path).read_text()

    _read_file = read

    def _write_file(self, path: str, content: str) -> str:
        self._path(path).write_text(content)
        return f"{path}: {len(content.splitlines())} lines written"

    def _str_replace(self, path: str, old: str, new: str) -> str:
        text = self.read(path)
        if text.count(old) != 1:
            raise ValueError(f"old occurs {text.count(old)} times in {path}, not once")
        self._path(path).write_text(text.replace(old, new))
        return f"{path}: replaced"

    def _run_tests(self) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir=."]
        environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "."}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the project needs none of the plugins installed here
        try:
            done = subprocess.run(
                command, cwd=self._folder, env=environment, capture_output=True, text=True, timeout=TESTS_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return f"error: not done after {TESTS_LIMIT_S:.0f} s"
        lines = (done.stdout or done.stderr).replace(str(self._folder), ".").splitlines()
        return "\n".join(re.sub(r" in [\d.]+s$", "", line) for line in lines if SHOWN.match(line))


Show = Callable[[Message], None]


class Agent:
    def __init__(self, gguf: Path, project: Project, max_reply: int, n_threads: int) -> None:
        self._text, self._project, self._max_reply = TextModel.load(gguf), project, max_reply
        self._loop, self._info = build(gguf, "auto", "cpu", 1, "--threads", str(n_threads), "--kv-bytes", str(KV_BYTES))
        self._loop.set_vocabulary(self._text.vocabulary)
        self._sessions = Sessions()
        self.messages = [Message("system", SYSTEM)]
        self.requests: list[ToolCall] = []

    def ask(self, turn: Turn, show: Show) -> None:
        """One message of the user, a tool call of the model, and what the tool returns."""
        attached = (
            f"\n\n<file path={turn.file}>\n{self._project.read(turn.file).rstrip()}\n</file>" if turn.file else ""
        )
        self._add(Message("user", turn.text + attached), show)
        reply = self._reply()
        self._add(reply, show)
        for call in reply.tool_calls:
            self._add(Message("tool", self._project.run(call), name=call.name, tool_call_id=call.id), show)

    def _add(self, message: Message, show: Show) -> None:
        self.messages.append(message)
        show(message)

    def _reply(self) -> Message:
        """Later prompts have the ids of the reply as the model has drawn them, as a server's have."""
        text, number = self._text, len(self.requests)
        asked = GenerateRequest(
            id=str(number),
            model="",
            messages=tuple(self.messages),
            tools=TOOLS,
            tool_choice=ToolChoice("required"),
            parallel_tool_calls=False,
        )
        digests = chain_digests(self.messages, {}, TOOLS)
        prompt = build_prompt(text, asked, self._sessions.find("", self._info.fingerprint, digests))
        spec = grammar_spec(text, asked, begun=False)
        assert spec is not None
        sampling = SamplingParams(max_tokens=self._max_reply, temperature=0.0)
        request = EngineRequest(
            id=asked.id, prompt_ids=prompt.ids, sampling=sampling, grammar=encode(build_grammar(spec))
        )
        ids, finish = self._decode(request)
        parser = text.reply_parser(prompt.ids, TOOLS, False)
        found = Reply().add(parser.push(unpack(ids))).add(parser.finish(cut=finish == "length"))
        calls = tuple(Call(f"call_{number}_{n}", call.name, call.arguments) for n, call in enumerate(found.calls))
        reply = Message("assistant", found.text, tool_calls=calls)
        for digest, entry in turn_entries(text, asked, prompt, digests, reply, ids):
            self._sessions.add("", self._info.fingerprint, digest, entry.ids, entry.text_len, entry.text_digest)
        self.requests.append(ToolCall(request, unpack(ids)))
        return reply

    def _decode(self, request: EngineRequest) -> tuple[bytes, str | None]:
        self._loop.submit(request, time.monotonic())
        ids, finish = b"", None
        while self._loop.busy:
            for delta in self._loop.step(time.monotonic()):
                assert delta.error is None, delta.error
                ids += delta.token_ids
                finish = delta.finish or finish
            if self._loop.blocked:
                time.sleep(1e-3)
        return ids, finish


def record(
    gguf: Path, user: Sequence[Turn] = USER, max_reply: int = MAX_REPLY, show: Show = lambda message: None,
    n_threads: int = os.cpu_count() or 1,
) -> Session:  # fmt: skip
    """Let the model answer the user's messages. Returns all messages, and the requests that they took."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in PROJECT.items():
            (Path(folder) / name).write_text(text)
        agent = Agent(gguf, Project(Path(folder)), max_reply, n_threads)
        for turn in user:
            agent.ask(turn, show)
        return Session(agent.messages, agent.requests)


def _print(message: Message) -> None:
    print(f"--- {message.role} {message.name or ''}".rstrip())
    print(message.content)
    for call in message.tool_calls:
        print(f"{call.name} {call.arguments}")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, nargs="?", help="the model; without it: print the session in the tree")
    parser.add_argument("--out", type=Path, default=CODER_SESSION)
    args = parser.parse_args(argv)
    if args.gguf is None:
        session = read_session(args.out)
        for message in session.messages:
            _print(message)
    else:
        session = record(args.gguf, show=_print)
        write_session(session, args.out)
    n_prompt = max(count(request.prompt_ids) for request, _ in session.requests)
    n_reply = sum(len(reply) for _, reply in session.requests)
    print(f"--- {len(session.requests)} requests, {n_reply} tokens of replies, prompts of up to {n_prompt}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
