"""Base of encoders: a packed batch of texts in, one vector or one row of logits for each text out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from emberline.protocol.encoding import Pooling


@dataclass(slots=True)
class PackedTexts:
    """Texts end to end, without padding."""

    token_ids: Tensor  # int64 [tokens]
    lens: list[int]  # tokens of each text, none of them 0
    second_starts: list[int] | None = None  # of pairs: where in each the second text begins

    def positions(self) -> Tensor:  # int64 [tokens]
        starts = torch.tensor(self.lens).cumsum(0) - torch.tensor(self.lens)
        return torch.arange(len(self.token_ids)) - starts.repeat_interleave(torch.tensor(self.lens))

    def token_types(self) -> Tensor:  # int64 [tokens]: 1 in the second text of a pair
        if self.second_starts is None:
            return torch.zeros_like(self.token_ids)
        seconds = torch.tensor(self.second_starts).repeat_interleave(torch.tensor(self.lens))
        return (self.positions() >= seconds).long()


class EncoderModel(Protocol):
    backend: str

    def hidden(self, texts: PackedTexts) -> Tensor:
        """The last layer's output, float32 [tokens, hidden]."""
        ...

    def logits(self, first: Tensor) -> Tensor:
        """Logits of the labels, from the hidden states of each text's first token: float32 [texts, labels]."""
        ...


def pool(hidden: Tensor, lens: Sequence[int], poolings: Sequence[Pooling]) -> Tensor:
    """One vector for each text, float32 [texts, hidden]."""
    out = hidden.new_empty(len(lens), hidden.shape[1])
    for row, (text, pooling) in enumerate(zip(torch.split(hidden, list(lens)), poolings, strict=True)):
        if pooling == "mean":
            torch.mean(text, 0, out=out[row])
        else:
            out[row] = text[0 if pooling == "cls" else -1]
    return out
