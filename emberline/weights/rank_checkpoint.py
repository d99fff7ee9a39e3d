"""The part of a checkpoint that one rank loads: slices of its tensors, by a table, of the layers of its stage.

A rank computes some of the heads and some of each MLP's width, so the outputs of all ranks add up to the layer's:

    rows     attn_q, attn_k, attn_v, ffn_gate, ffn_up, the embedding and the head (by vocabulary)
    columns  attn_output, ffn_down
    whole    norms, the router, and MLA's first projections, whose latent every head reads

Experts are divided by width, like an MLP, or by expert. A slice is a view of the mapped file: nothing else is read.
Of a pipeline's stages the first has the embedding, the last the norm behind all layers and the head, which may be the
embedding again.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from emberline.protocol.parallel_layout import nearest_divisors
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.model_config import BadCheckpoint, ModelConfig, MoEConfig
from emberline.weights.tensors import FORMATS, Weight

ExpertsBy = Literal["width", "expert"]

_ROWS = frozenset(
    {"attn_q", "attn_q_b", "attn_kv_b", "attn_sinks", "ffn_gate", "ffn_up"} | {"ffn_gate_shexp", "ffn_up_shexp"}
)
_VOCABULARY = frozenset({"token_embd", "output"})
_KV_ROWS = frozenset({"attn_k", "attn_v"})
_COLUMNS = frozenset({"attn_output", "ffn_down", "ffn_down_shexp"})
_EXPERT_ROWS = frozenset({"ffn_gate_exps", "ffn_up_exps"})
_EXPERT_COLUMNS = frozenset({"ffn_down_exps"})


class Rank(NamedTuple):
    number: int
    of: int  # ranks in the group

    def part(self, size: int, what: str) -> tuple[int, int]:
        """Start and stop of this rank's share; raises BadCheckpoint where it does not divide."""
        if size % self.of:
            works = nearest_divisors(size, self.of)
            raise BadCheckpoint(f"{what}: {size} cannot be divided among {self.of} ranks, but among {works}")
        return self.number * size // self.of, (self.number + 1) * size // self.of

    def vocabulary(self, size: int) -> tuple[int, int]:
        """The rank's rows [start, stop] of a vocabulary, whose size need not divide."""
        return self.number * size // self.of, (self.number + 1) * size // self.of

    def kv_heads(self, n: int) -> tuple[int, int]:
        """The rank's first KV head, and their number. With fewer heads than ranks, several ranks have the same one."""
        if n < self.of and self.of % n == 0:
            head = self.number * n // self.of
            return head, head + 1
        return self.part(n, "KV heads")


class _SomeExperts(MoEConfig, frozen=True, kw_only=True):
    """Configuration of a rank: the fingerprint is made of the checkpoint's own, which lacks the added field."""

    before: int  # experts on the ranks before

    @property
    def first_expert(self) -> int:
        return self.before


class RankCheckpoint:
    """A checkpoint as rank `rank` sees it: its configuration is that of a smaller model."""

    def __init__(
        self, source: Checkpoint, rank: Rank, experts_by: ExpertsBy = "width", layers: range | None = None
    ) -> None:
        self.config = rank_config(source.config, rank, experts_by)
        self.has = source.has
        self.layers = range(source.config.n_layers) if layers is None else layers
        self._source, self._rank, self._experts_by = source, rank, experts_by
        self._whole: ModelConfig = source.config

    def _of_stage(self, name: str) -> bool:
        first, last = self.layers.start == 0, self.layers.stop == self._whole.n_layers
        if name.startswith("blk."):
            return int(name.split(".", 2)[1]) in self.layers
        if name.startswith("token_embd."):
            return first or (last and not self.has("output.weight"))
        return last

    @property
    def names(self) -> Iterable[str]:
        """Names of the source's tensors that the rank has a part of, as the rank numbers its experts."""
        first, stop = self._own_experts
        for name in self._source.names:
            part, expert, suffix = split_name(name)
            if not self._of_stage(name):
                continue
            if expert is None:
                yield name
            elif first <= expert < stop:
                yield f"{part}.{expert - first}.{suffix}"

    def weight(self, name: str) -> Weight:
        part, expert, suffix = split_name(name)
        if expert is not None:
            name = f"{part}.{expert + self._own_experts[0]}.{suffix}"
        weight, kind = self._source.weight(name), part.rpartition(".")[2]
        by_width = self._experts_by == "width"
        if kind in _VOCABULARY:
            return weight.slice(0, *self._rank.vocabulary(weight.shape[0]))
        if kind in _KV_ROWS:
            n_heads = self._whole.n_kv_heads
            dim = weight.shape[0] // n_heads
            first, stop = self._rank.kv_heads(n_heads)
            return weight.slice(0, first * dim, stop * dim)
        if kind in _ROWS or (by_width and kind in _EXPERT_ROWS):
            return weight.slice(0, *self._rank.part(weight.shape[0], f"rows of {name!r}"))
        if kind in _COLUMNS or (by_width and kind in _EXPERT_COLUMNS):
            if suffix == "bias":
                return weight if self._rank.number == 0 else _zeros(weight)  # the ranks' outputs are added up
            return self._columns(weight, name)
        return weight

    def _columns(self, weight: Weight, name: str) -> Weight:
        start, stop = self._rank.part(weight.shape[1], f"columns of {name!r}")
        try:
            return weight.slice(1, start, stop)
        except BadCheckpoint as error:
            block = getattr(weight, "group", 0) or FORMATS[weight.kind].block
            works = nearest_divisors(weight.shape[1] // block, self._rank.of)
            raise BadCheckpoint(
                f"{error}: it cannot be divided among {self._rank.of} ranks, but among {works}; experts can also be "
                f"spread whole (--ep)"
            ) from None

    @property
    def _own_experts(self) -> tuple[int, int]:
        moe = self._whole.moe
        if moe is None or self._experts_by == "width":
            return 0, 0 if moe is None else moe.experts
        return self._rank.part(moe.experts, "experts")


def rank_config(config: ModelConfig, rank: Rank, experts_by: ExpertsBy = "width") -> ModelConfig:
    """The configuration of a rank's part. The vocabulary is that of the whole model."""

    def share(size: int, what: str) -> int:
        start, stop = rank.part(size, what)
        return stop - start

    def moe_share(moe: MoEConfig) -> MoEConfig:
        by_width = experts_by == "width"
        if not by_width:
            moe = _SomeExperts(**msgspec.structs.asdict(moe), before=rank.part(moe.experts, "experts")[0])
        return msgspec.structs.replace(
            moe,
            experts=moe.experts if by_width else share(moe.experts, "experts"),
            width=share(moe.width, "width of an expert") if by_width else moe.width,
            shared_width=share(moe.shared_width, "width of the shared experts"),
        )

    first, stop = rank.kv_heads(config.n_kv_heads)
    return msgspec.structs.replace(
        config,
        n_heads=share(config.n_heads, "heads"),
        n_kv_heads=stop - first,
        mlp_size=share(config.mlp_size, "width of the MLP"),
        moe=None if config.moe is None else moe_share(config.moe),
    )


def split_name(name: str) -> tuple[str, int | None, str]:
    """Name without its suffix, the expert's number if it is one's, and the suffix."""
    part, _, suffix = name.rpartition(".")
    before, _, last = part.rpartition(".")
    return (before, int(last), suffix) if last.isdigit() and before.endswith("_exps") else (part, None, suffix)


def _zeros(weight: Weight) -> Weight:
    return replace(weight, raw=np.zeros_like(weight.raw), location=None)
