"""The part of a model that one rank of a layout holds, and which layouts a model can be divided by."""

from dataclasses import dataclass
from typing import Any

from emberline.kernels.collectives import ALONE, Loopback, NoCollectives, ParallelGroups
from emberline.kernels.token_share import TokenShare
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout, Position, StageSplit, nearest_divisors
from emberline.weights.model_config import ModelConfig
from emberline.weights.rank_checkpoint import Rank, RankCheckpoint


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's place in the layout, the layers of every stage, and the groups through which it talks to other ranks."""

    layout: Layout
    position: Position
    stages: StageSplit
    groups: ParallelGroups
    n_kv_heads: int  # of the model; 1: latent attention, whose heads share one

    @classmethod
    def of(
        cls, config: ModelConfig, layout: Layout, position: Position, groups: ParallelGroups,
        stages: StageSplit | None = None,
    ) -> "Shard":  # fmt: skip
        """The shard of a model's configuration. Raises BadInput if the layout does not divide it."""
        check_layout(config, layout)
        stages = stages or StageSplit.even(config.n_layers, layout.pp)
        stages.check(config.n_layers, layout.pp)
        return cls(layout, position, stages, groups, 1 if config.latent is not None else config.n_kv_heads)

    @classmethod
    def whole(cls, config: ModelConfig) -> "Shard":
        """All of a model."""
        return cls(Layout(), Position(), StageSplit.even(config.n_layers, 1), ALONE, 1)

    @property
    def layers(self) -> range:
        return self.stages.layers(self.position.stage)

    @property
    def is_last(self) -> bool:
        """True if the rank's stage is the last one, which samples."""
        return self.position.stage == self.layout.pp - 1

    @property
    def rank(self) -> Rank:
        """The process's rank among those that divide the stage's layers."""
        return Rank(self.position.tp_rank, self.layout.tp)

    @property
    def token_share(self) -> TokenShare:
        return TokenShare(self.position.tp_rank % self.layout.dcp, self.layout.dcp)

    def checkpoint(self, source: Any) -> RankCheckpoint:
        """The rank's view of a model's `weights.checkpoint.Checkpoint`."""
        return RankCheckpoint(source, self.rank, "expert" if self.layout.ep else "width", self.layers)

    @property
    def first_kv_head(self) -> int:
        """Index of the rank's first KV head among the model's."""
        return 0 if self.n_kv_heads == 1 else self.rank.kv_heads(self.n_kv_heads)[0]

    def vocabulary(self, size: int) -> list[int]:
        """Rows of the embedding that each rank of the stage has."""
        bounds = [Rank(n, self.layout.tp).vocabulary(size) for n in range(self.layout.tp)]
        return [stop - start for start, stop in bounds]


def loopback_groups(layout: Layout, position: Position) -> ParallelGroups:
    """A rank alone, as if the others were there: for its memory and times."""
    groups = (
        (position.tp_rank, layout.tp),
        (position.tp_rank % layout.dcp, layout.dcp),
        (position.stage, layout.pp),
    )
    return ParallelGroups(*(NoCollectives() if size == 1 else Loopback(rank, size) for rank, size in groups))


def check_layout(config: ModelConfig, layout: Layout) -> None:
    """BadInput: the model cannot be divided so; the message names the number and the nearest that work."""
    layout.check()
    layout.check_layers(config.n_layers)
    layout.check_divides("attention heads", config.n_heads)
    if config.latent is None and layout.tp % config.n_kv_heads:  # else a KV head is on several ranks
        layout.check_divides("KV heads", config.n_kv_heads)
    moe = config.moe
    if moe is None or len(moe.layers) < config.n_layers:
        layout.check_divides("columns of the MLP", config.mlp_size)
    if moe is not None:
        layout.check_divides("experts", moe.experts) if layout.ep else layout.check_divides(
            "columns of an expert (--ep spreads whole experts)", moe.width
        )
        layout.check_divides("columns of the shared experts", moe.shared_width)
    elif layout.ep:
        raise BadInput(f"--ep: {config.architecture} models have no experts", param="ep")
    if layout.dcp > 1 and config.latent is None:
        heads = f"this model's {config.n_kv_heads} KV heads are divided by --tp already"
        raise BadInput(f"--dcp is for models with latent attention (MLA); {heads}", param="dcp")
    if BLOCK_TOKENS % layout.dcp:
        works = nearest_divisors(BLOCK_TOKENS, layout.dcp)
        raise BadInput(f"--dcp {layout.dcp} does not divide a block of {BLOCK_TOKENS} tokens: use {works}", param="dcp")
