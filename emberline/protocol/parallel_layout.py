"""Division of one model among the ranks of a group: tensor, pipeline, expert and decode context parallelism.

A rank is one process with one device. Ranks are numbered stage by stage: rank = stage * tp + tp_rank, so the ranks of
one stage, which exchange the most, are neighbors. Rank 0 is the engine worker that speaks the protocol.
"""

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from emberline.protocol.errors import BadInput

MAX_RANKS = 64  # of one group: more replicas serve more users than one replica on more devices


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Position of a rank in its group."""

    stage: int = 0
    tp_rank: int = 0


class Layout(msgspec.Struct, frozen=True):
    """Number of parts that a model is divided into along each dimension."""

    tp: int = 1  # tensor parallelism: heads and widths divided among the ranks of a stage
    pp: int = 1  # pipeline parallelism: layers divided into stages
    ep: bool = False  # expert parallelism: the ranks of a stage hold whole experts instead of a slice of each
    dcp: int = 1  # decode context parallelism: the KV of one sequence is spread over so many ranks of a stage

    @property
    def n_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """Name of the layout in logs, tables and error messages: "tp8 dcp8", "tp4 pp2 ep", "one rank"."""
        named = [f"{key}{n}" for key, n in (("tp", self.tp), ("pp", self.pp), ("dcp", self.dcp)) if n > 1]
        return " ".join([*named, *(["ep"] if self.ep else [])]) or "one rank"

    def position(self, rank: int) -> Position:
        if not 0 <= rank < self.n_ranks:
            raise ValueError(f"rank {rank} of {self.n_ranks}")
        return Position(*divmod(rank, self.tp))

    def rank(self, position: Position) -> int:
        return position.stage * self.tp + position.tp_rank

    def stage_ranks(self, stage: int) -> range:
        """The ranks that compute one stage together."""
        return range(stage * self.tp, (stage + 1) * self.tp)

    @property
    def sampling_rank(self) -> int:
        """The rank whose samples count: the first of the last stage, which in a pipeline tells rank 0."""
        return self.stage_ranks(self.pp - 1)[0]

    def check(self) -> None:
        """BadInput: the numbers do not fit each other."""
        for key in ("tp", "pp", "dcp"):
            if getattr(self, key) < 1:
                raise BadInput(f"--{key} must be at least 1, not {getattr(self, key)}", param=key)
        if self.n_ranks > MAX_RANKS:
            asked = f"--tp {self.tp} --pp {self.pp} asks for {self.n_ranks} ranks"
            raise BadInput(f"{asked}; one group has at most {MAX_RANKS}. Use --replicas for more", param="tp")
        if self.tp % self.dcp:
            raise BadInput(
                f"--dcp {self.dcp} does not divide --tp {self.tp}: use {nearest_divisors(self.tp, self.dcp)}",
                param="dcp",
            )
        if self.ep and self.tp == 1:
            raise BadInput("--ep spreads experts over the ranks of --tp: give --tp 2 or more", param="ep")

    def check_divides(self, what: str, number: int, key: str = "tp") -> None:
        """BadInput unless the model's `number` of `what` ("attention heads") is a multiple of the layout's `key`."""
        parts = getattr(self, key)
        if number % parts:
            works = nearest_divisors(number, parts)
            raise BadInput(f"--{key} {parts} does not divide the model's {number} {what}: use {works}", param=key)

    def check_layers(self, n_layers: int) -> None:
        """BadInput: there are more stages than layers."""
        if self.pp > n_layers:
            raise BadInput(
                f"--pp {self.pp} asks for more stages than the model's {n_layers} layers: use at most {n_layers}",
                param="pp",
            )


class StageSplit(msgspec.Struct, frozen=True):
    """Layers that each pipeline stage computes. The first stage also has the embedding, the last one the norm and the
    head."""

    bounds: tuple[int, ...]  # stage s has layers bounds[s] up to bounds[s + 1]; the last bound is the model's layers

    @classmethod
    def even(cls, n_layers: int, n_stages: int) -> "StageSplit":
        """Divide the layers evenly. Where they do not divide, the stages in the middle get one more."""
        base, more = divmod(n_layers, n_stages)
        first = (n_stages - more) // 2
        bounds = [0]
        for stage in range(n_stages):
            bounds.append(bounds[-1] + base + (first <= stage < first + more))
        return cls(tuple(bounds))

    @property
    def n_stages(self) -> int:
        return len(self.bounds) - 1

    @property
    def n_layers(self) -> int:
        return self.bounds[-1]

    def layers(self, stage: int) -> range:
        return range(self.bounds[stage], self.bounds[stage + 1])

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.n_stages - 1

    def check(self, n_layers: int, n_stages: int) -> None:
        """BadInput: it is no division of so many layers into so many stages."""
        shape_fits = len(self.bounds) == n_stages + 1 and self.bounds[0] == 0 and self.bounds[-1] == n_layers
        if not shape_fits or any(start >= end for start, end in pairwise(self.bounds)):
            even = list(StageSplit.even(n_layers, n_stages).bounds)
            raise BadInput(
                f"the stage bounds {list(self.bounds)} do not divide {n_layers} layers into {n_stages} stages: "
                f"give {n_stages + 1} rising numbers from 0 to {n_layers}, as {even}"
            )


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_divisors(number: int, wanted: int) -> str:
    """The divisors next to `wanted`, in words: "4 or 8"."""
    found: Sequence[int] = divisors(number)
    near = [max((n for n in found if n <= wanted), default=None), min((n for n in found if n > wanted), default=None)]
    return " or ".join(str(n) for n in near if n is not None)
