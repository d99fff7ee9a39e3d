"""A smaller model that drafts for another one: a decoder of its own, with KV groups of its own.

What it keeps of a token depends on no later token, as in any model. So its blocks follow those of the sequence: cached
prefixes, preemption, tiers and transfer treat them like the model's own, under the same content keys.
"""

from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from emberline.models.decoder import Decoder, StepInputs

KV_GROUP = "draft"


class DraftModel:
    """On a backend of its own, of the device of the model that it drafts for."""

    def __init__(self, model: Decoder, fingerprint: str, n_layers: int, vocab_size: int) -> None:
        """n_layers, vocab_size: of the model it drafts for. The vocabularies are the same, their padding may not be."""
        self.decoder, self.vocab_size = model, vocab_size
        self.kv_groups = tuple(
            msgspec.structs.replace(
                group,
                name=f"{KV_GROUP}-{fingerprint[:12]}-{group.name}",  # what it caches is of no use to another model
                layers=tuple(n_layers + n for n in group.layers),  # behind the model's own
            )
            for group in model.kv_groups
        )
        self.has_windows = not all(group.keeps_all for group in self.kv_groups)

    def forward(self, step: StepInputs, pools: list[Tensor]) -> Tensor:
        """Logits over the vocabulary of the model it drafts for, float32 [samples, vocab]; writes the entries of the
        step's tokens to `pools`, one for each of its groups."""
        missing = self.vocab_size - self.decoder.config.vocab_size
        if missing > 0:  # ids of padding
            step = replace(step, token_ids=step.token_ids.clamp(max=self.decoder.config.vocab_size - 1))
        logits = self.decoder.forward(step, pools)
        if missing <= 0:
            return logits[:, : self.vocab_size].contiguous()
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
