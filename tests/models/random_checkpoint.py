"""A checkpoint of random weights in memory, the same for every backend that reads it."""

import numpy as np
import torch

from emberline.weights.model_config import ModelConfig
from emberline.weights.tensor_shapes import expected_shapes
from emberline.weights.tensors import Affine


class RandomWeight:
    """Float, or with `bits` 4 or 8 affine in groups of 32; norm weights are around one."""

    kind = "f32"

    def __init__(self, name: str, shape: tuple[int, ...], scale: float = 0.1, bits: int = 0) -> None:
        self.name, self.shape, self.scale, self.bits = name, shape, scale, bits

    @property
    def _seed(self) -> int:
        return sum(map(ord, self.name))

    def affine(self, unpack: object = None) -> Affine | None:
        if not self.bits or len(self.shape) != 2:
            return None
        rng = np.random.default_rng(self._seed)
        groups = (self.shape[0], self.shape[1] // 32)
        scale = rng.uniform(0.01, 0.02, groups).astype(np.float16).astype(np.float32) / (1 << (self.bits - 4))
        offset = (-scale * 2 ** (self.bits - 1)).astype(np.float16).astype(np.float32)
        return Affine(rng.integers(0, 2**self.bits, self.shape, dtype=np.uint8), scale, offset, self.bits)

    def dense(self) -> np.ndarray:
        return self.tensor(torch.float32, "cpu").numpy()

    def tensor(self, dtype: torch.dtype, device: str) -> torch.Tensor:
        affine = self.affine()
        if affine is not None:
            return torch.from_numpy(affine.dense().astype(np.float32)).to(device=device, dtype=dtype)
        values = torch.randn(self.shape, generator=torch.Generator().manual_seed(self._seed)) * self.scale
        is_norm = len(self.shape) == 1 and not self.name.endswith("bias")
        return (values + is_norm).to(dtype).to(device)

    def into(self, target: torch.Tensor) -> None:
        target.copy_(self.tensor(target.dtype, "cpu"))


class RandomCheckpoint:
    def __init__(self, config: ModelConfig, scale: float = 0.1, bits: int = 0) -> None:
        self.config, self.scale, self.bits = config, scale, bits
        self._shapes = dict(expected_shapes(config))

    def has(self, name: str) -> bool:
        return name != "output.weight" or not self.config.tie_embeddings

    def weight(self, name: str) -> RandomWeight:
        c, (part, kind) = self.config, name.split(".")[-2:]
        hidden, q, kv = c.hidden_size, c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
        shapes = {
            **dict.fromkeys(("token_embd", "output"), (c.vocab_size, hidden)),
            "attn_q": (q, hidden),
            **dict.fromkeys(("attn_k", "attn_v"), (kv, hidden)),
            "attn_output": (hidden, q),
            **dict.fromkeys(("ffn_gate", "ffn_up"), (c.mlp_size, hidden)),
            "ffn_down": (hidden, c.mlp_size),
            **dict.fromkeys(("attn_q_norm", "attn_k_norm"), (c.head_dim,)),
        }
        shape: tuple[int, ...] = shapes.get(part, (hidden,))
        shape = self._shapes.get(name, shape[:1] if kind == "bias" else shape)
        return RandomWeight(name, shape, self.scale, self.bits)
