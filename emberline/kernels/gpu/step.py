"""What the host knows of a step without asking the device: all that shapes a launch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence, more than one of them or a prompt's last."""

    row: int
    start: int  # index of its first token in the step
    n: int
    context: int  # its length, the new tokens included


@dataclass(slots=True)
class StepShape:
    """Rows that add one token come first: row r of them is token r. Chunks follow.

    A captured graph is replayed with other contexts: only `decode_rows` and `max_query` are baked into it. The last of
    the decode rows may be nobody's: their context is 0, and beside chunks they have no token.
    """

    decode_rows: int
    max_query: int = 0  # longest chunk; 0: there is none
    shared: Tensor | None = None  # int32 [2]: a row whose table starts with the shared prefix, and its tokens
    shares: Tensor | None = None  # int32 [rows]: tokens of that prefix each row has, all of it or 0
    chunks: list[Chunk] | None = None  # None: chunks may be anything, as in a captured graph
