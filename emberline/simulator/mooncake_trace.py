"""Mooncake's conversation trace: chat requests over an hour, prefixes in blocks of 512 tokens, arrivals of their own.

Published at github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl (Apache-2.0).
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from emberline.protocol.errors import BadInput
from emberline.simulator.file_lines import lines
from emberline.simulator.trace import Segments, Session, Trace, Turn, runs_of

BLOCK_TOKENS = 512


class Row(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, context_len: int) -> Trace:
    decoder = msgspec.json.Decoder(Row)
    return build([decoder.decode(line) for line in lines(path)], context_len)


def build(rows: Iterable[Row], context_len: int) -> Trace:
    """One turn a session; who belongs to one conversation shows in the blocks alone."""
    kept, left_out = [], 0
    for row in rows:
        if len(row.hash_ids) != -(-row.input_length // BLOCK_TOKENS):
            raise BadInput("a row's hash_ids do not fit its input_length in blocks of 512 tokens", param="trace")
        if row.input_length + row.output_length > context_len or row.input_length < 1:
            left_out += 1
        else:
            kept.append(row)
    prompts = [runs_of(row.hash_ids) for row in kept]
    segments = Segments(prompts)
    sessions = []
    for row, runs in zip(kept, prompts):
        path, lengths = segments.path(runs)
        turn = Turn(path, lengths, row.input_length, max(1, row.output_length))
        second = row.hash_ids[1] if len(row.hash_ids) > 1 else row.hash_ids[0]  # the first is all conversations'
        sessions.append(Session((turn,), row.timestamp / 1e3, group=second + 1))
    return Trace("mooncake", BLOCK_TOKENS, sessions, len(segments), True, left_out)
