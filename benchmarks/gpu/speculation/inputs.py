"""What the parts decode, as token ids: made where a tokenizer is, and read where only the engine's packages are."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.protocol.frames import Vocabulary
from emberline.protocol.request import EngineRequest, Message
from emberline.protocol.token_ids import unpack

HELD_OUT = Path(__file__).parents[3] / "examples" / "draft_head" / "held_out.txt"  # prompts no head was trained with
CODER_SESSION = Path(__file__).parents[2] / "data" / "coder_session.gz"  # of `transcript`
MAX_REQUESTS, MAX_PROMPT, MAX_REPLY, MIN_REPLY = 112, 6500, 400, 24  # tokens; of recorded requests


class Recorded(NamedTuple):
    prompt: list[int]
    reply: list[int]


class ToolCall(NamedTuple):
    request: EngineRequest  # with its grammar
    reply: list[int]


class Session(msgspec.Struct, frozen=True):
    """Of a coding agent: all that was said, and the requests with what the model replied."""

    messages: list[Message]
    requests: list[ToolCall]


class Coder(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    requests: list[ToolCall]  # of one session, in order


class Inputs(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    calls: list[ToolCall]
    chats: list[list[int]]  # held-out prompts in the model's chat template
    recorded: list[Recorded]  # requests of agents; empty: made without a trace
    coder: Coder | None = None  # None: made without its model


def make(trace: Path | None = None, gguf: Path | None = None, coder: Path | None = None) -> Inputs:
    """By the tokenizer of a model, the default one unless given. coder: the model of the session in the tree."""
    from benchmarks.emberline_contender import default_gguf
    from benchmarks.speculation import CALLS, tool_calls
    from emberline.text.text_model import TextModel

    text = TextModel.load(gguf or default_gguf())
    prompts = [line for line in HELD_OUT.read_text().splitlines() if line.strip()]
    chats = [unpack(text.encode(text.render([Message("user", line)]), special=True)) for line in prompts]
    found = list[Recorded]()
    for asked, answered in _rows(trace) if trace is not None else ():
        prompt, reply = (unpack(text.encode(each, special=False)) for each in (asked, answered))
        if len(prompt) <= MAX_PROMPT and len(reply) >= MIN_REPLY and len(found) < MAX_REQUESTS:
            found.append(Recorded(prompt, reply[:MAX_REPLY]))
    calls = [ToolCall(*call) for call in tool_calls(text, CALLS)]
    return Inputs(text.vocabulary, calls, chats, found, None if coder is None else make_coder(coder))


def make_coder(gguf: Path, session: Path = CODER_SESSION) -> Coder:
    from emberline.text.text_model import TextModel

    return Coder(TextModel.load(gguf).vocabulary, read_session(session).requests)


def _rows(trace: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: row.get("timestamp", 0))
    return ((row["input"], row["output"]) for row in rows if len(row["input"]) <= 8 * MAX_PROMPT)


def write(inputs: Inputs, path: Path) -> None:
    path.write_bytes(gzip.compress(msgspec.msgpack.encode(inputs)))


def read(path: Path) -> Inputs:
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Inputs)


def write_session(session: Session, path: Path) -> None:
    path.write_bytes(gzip.compress(msgspec.msgpack.encode(session), mtime=0))


def read_session(path: Path) -> Session:
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Session)
