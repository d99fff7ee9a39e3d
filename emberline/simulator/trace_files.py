"""A trace by name: of a file in one of the known forms, or made up."""

from pathlib import Path

import msgspec

from emberline.protocol.errors import BadInput
from emberline.simulator import claude_code_trace as claude_code
from emberline.simulator import generator
from emberline.simulator import mooncake_trace as mooncake
from emberline.simulator.file_lines import lines
from emberline.simulator.trace import Trace

MADE_UP = {"agents": generator.agents, "chats": generator.chats}


def open_trace(name: str, seed: int, context_len: int) -> Trace:
    """ "agents" and "chats" are made up; everything else is a file, whose form its first line shows."""
    if name in MADE_UP:
        return MADE_UP[name](seed, context_len)
    path = Path(name)
    if not path.is_file():
        known = ", ".join(MADE_UP)
        raise BadInput(
            f"there is no trace {name!r}: give a file (.jsonl or .jsonl.gz), or one of {known}", param="trace"
        )
    try:
        first = msgspec.json.decode(next(lines(path), b"{}"), type=dict)
        if "hash_ids" in first:
            trace = mooncake.read(path, context_len)
        elif "requests" in first:
            trace = claude_code.read(path, context_len)
        else:
            raise BadInput(
                f"{name} has neither Mooncake's rows (hash_ids) nor agents' sessions (requests)", param="trace"
            )
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"{name} cannot be read: {error}", param="trace") from None
    if not trace.sessions:
        raise BadInput(f"{name} holds no request that fits a context of {context_len} tokens", param="trace")
    return trace
