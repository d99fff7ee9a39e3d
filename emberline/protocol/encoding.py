"""Tasks other than generation: what an encoder computes of a request's texts."""

from typing import Literal

import msgspec

Task = Literal["generate", "embed", "rerank", "classify", "transcribe"]
Pooling = Literal["mean", "cls", "last"]


class EncodeParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of an `EngineRequest` whose `prompt_ids` are several texts end to end. The result is a row of float32
    values for each: a vector, or with a classification head the logits of its labels."""

    lens: bytes  # tokens of each text, u32 little-endian
    second_starts: bytes = b""  # of pairs of texts: where in each the second one begins, u32; empty: no pairs
    pooling: Pooling = "mean"  # of a vector; a classification head has its own
    normalize: bool = True  # vectors have length one
    dimensions: int = 0  # the first so many of a vector; 0: all
