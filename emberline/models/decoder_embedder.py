"""A decoder used as an embedder (Qwen3-Embedding): its last hidden states, of which one per text is the vector."""

import torch
from torch import Tensor

from emberline.models.decoder import Decoder, StepInputs
from emberline.models.encoder import PackedTexts
from emberline.protocol.block_hash import BLOCK_TOKENS


class DecoderEmbedder:
    """Texts are prefilled, each at once, into a KV pool that is as large as the largest batch and keeps nothing."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.backend = decoder.backend
        self._kv: list[Tensor] = []

    def hidden(self, texts: PackedTexts) -> Tensor:
        n_blocks = [-(-length // BLOCK_TOKENS) for length in texts.lens]
        tables = torch.zeros(len(n_blocks), max(n_blocks), dtype=torch.int32)
        first = 1  # block 0 is the null block
        for row, n in enumerate(n_blocks):
            tables[row, :n] = torch.arange(first, first + n)
            first += n
        self._reserve(first)
        device = self._decoder.device
        starts = torch.tensor([0, *texts.lens]).cumsum(0)
        step = StepInputs(
            token_ids=texts.token_ids.int().to(device),
            positions=texts.positions().int().to(device),
            query_starts=starts.int().to(device),
            context_lens=torch.tensor(texts.lens, dtype=torch.int32, device=device),
            block_tables=[tables.to(device)] * len(self._kv),
            sample_tokens=torch.empty(0, dtype=torch.int64, device=device),
        )
        return self._decoder.hidden(step, self._kv)

    def logits(self, first: Tensor) -> Tensor:
        raise NotImplementedError("a decoder has no classification head")

    def _reserve(self, n_blocks: int) -> None:
        if self._kv and len(self._kv[0]) >= n_blocks:
            return
        self._kv = [
            torch.zeros(
                (n_blocks, *group.block_shape),
                dtype=getattr(torch, group.dtype),
                device=self._decoder.device,
            )
            for group in self._decoder.kv_groups
        ]
