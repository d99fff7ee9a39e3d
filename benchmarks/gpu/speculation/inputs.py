"""What the parts decode, as token ids: made where a tokenizer is, and read where only the engine's packages are."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from emberline.protocol.frames import Vocabulary
from emberline.protocol.request import EngineRequest
from emberline.protocol.token_ids import unpack

HELD_OUT = Path(__file__).parents[3] / "examples" / "draft_head" / "held_out.txt"  # prompts no head was trained with
MAX_REQUESTS, MAX_PROMPT, MAX_REPLY, MIN_REPLY = 112, 6500, 400, 24  # tokens; of recorded requests


class Recorded(NamedTuple):
    prompt: list[int]
    reply: list[int]


class ToolCall(NamedTuple):
    request: EngineRequest  # with its grammar
    reply: list[int]


class Inputs(msgspec.Struct, frozen=True):
    vocabulary: Vocabulary
    calls: list[ToolCall]
    chats: list[list[int]]  # held-out prompts in the model's chat template
    recorded: list[Recorded]  # requests of agents; empty: made without a trace


def make(trace: Path | None = None, gguf: Path | None = None) -> Inputs:
    """By the tokenizer of a model, the default one unless given."""
    from benchmarks.emberline_contender import default_gguf
    from benchmarks.speculation import CALLS, tool_calls
    from emberline.protocol.request import Message
    from emberline.text.text_model import TextModel

    text = TextModel.load(gguf or default_gguf())
    prompts = [line for line in HELD_OUT.read_text().splitlines() if line.strip()]
    chats = [unpack(text.encode(text.render([Message("user", line)]), special=True)) for line in prompts]
    found = list[Recorded]()
    for asked, answered in _rows(trace) if trace is not None else ():
        prompt, reply = (unpack(text.encode(each, special=False)) for each in (asked, answered))
        if len(prompt) <= MAX_PROMPT and len(reply) >= MIN_REPLY and len(found) < MAX_REQUESTS:
            found.append(Recorded(prompt, reply[:MAX_REPLY]))
    return Inputs(text.vocabulary, [ToolCall(*call) for call in tool_calls(text, CALLS)], chats, found)


def _rows(trace: Path) -> Iterator[tuple[str, str]]:
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        rows = sorted((json.loads(line) for line in lines), key=lambda row: row.get("timestamp", 0))
    return ((row["input"], row["output"]) for row in rows if len(row["input"]) <= 8 * MAX_PROMPT)


def write(inputs: Inputs, path: Path) -> None:
    path.write_bytes(gzip.compress(msgspec.msgpack.encode(inputs)))


def read(path: Path) -> Inputs:
    return msgspec.msgpack.decode(gzip.decompress(path.read_bytes()), type=Inputs)
