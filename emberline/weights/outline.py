"""A checkpoint to plan with: the layers that are alike, and weights that are made only when they are asked for.

A model of 61 layers with 384 experts each has 70,000 tensors and two kinds of layers. A plan needs one layer of each
kind and one expert of each layer.
"""

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any, Protocol

import msgspec

from emberline.weights.generated import FileFormat, ZeroPools, generate_weight, generated_config
from emberline.weights.model_config import ModelConfig
from emberline.weights.rank_checkpoint import split_name
from emberline.weights.tensor_shapes import expected_shapes
from emberline.weights.tensors import Shape, Weight


class TensorSource(Protocol):
    """The part of a checkpoint's interface that is needed here."""

    @property
    def config(self) -> Any: ...
    @property
    def names(self) -> Iterable[str]: ...
    def has(self, name: str) -> bool: ...
    def weight(self, name: str) -> Weight: ...


class OutlineCheckpoint:
    """The checkpoint that a config.json describes, all zeros. Its experts are numbered, but only the first exists."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.config: ModelConfig = generated_config(document)
        self._format = FileFormat.of(document, self.config)
        self._pools = ZeroPools(0)
        self._made: dict[str, Weight] = {}

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        moe = self.config.moe
        one = None if moe is None else msgspec.structs.replace(moe, experts=1)
        found = dict(expected_shapes(msgspec.structs.replace(self.config, moe=one)))
        if moe is not None:  # the router has all of them
            rows = {name: (moe.experts, *shape[1:]) for name, shape in found.items() if _by_expert(name)}
            found |= rows
        return found

    @property
    def names(self) -> Iterable[str]:
        return self._shapes

    def has(self, name: str) -> bool:
        return first_expert(name) in self._shapes

    def weight(self, name: str) -> Weight:
        name = first_expert(name)
        if name not in self._made:
            self._made[name] = generate_weight(name, self._shapes[name], self._format, self._pools)
        return self._made[name]

    @property
    def counted(self) -> Iterable[tuple[Weight, int]]:
        """Every weight, with the number of tensors of the checkpoint that it stands for."""
        experts = 1 if self.config.moe is None else self.config.moe.experts
        for name in self.names:
            of_expert = "_exps." in name and split_name(name)[1] is not None
            yield self.weight(name), experts if of_expert else 1

    def tensor_format(self, name: str) -> Hashable:
        return self._shapes[name], self._format.scheme(name, self._shapes[name])


class OneOfEach:
    """A checkpoint of which one expert stands for all of a layer: its weights are looked up once."""

    def __init__(self, source: TensorSource) -> None:
        self.config, self.has = source.config, source.has
        self._source = source
        self._found: dict[str, Weight] = {}

    def weight(self, name: str) -> Weight:
        name = first_expert(name)
        if name not in self._found:
            self._found[name] = self._source.weight(name)
        return self._found[name]


def layer_kinds(source: TensorSource) -> list[int]:
    """For each layer the first that is like it: the same tensors in the same format, the same attention."""
    config: ModelConfig = source.config
    tensors: list[list[Hashable]] = [[] for _ in range(config.n_layers)]
    for name in source.names:
        number, _, rest = name.removeprefix("blk.").partition(".")
        if name.startswith("blk.") and first_expert(name) == name:
            tensors[int(number)].append((rest, tensor_format(source, name)))
    first: dict[Hashable, int] = {}
    for n, found in enumerate(tensors):
        windows = (sizes[n] if sizes else None for sizes in (config.windows, config.chunks))
        found += [*windows, n in config.nope_layers, n in config.moe_layers]
    return [first.setdefault(tuple(found), n) for n, found in enumerate(tensors)]


def tensor_format(source: TensorSource, name: str) -> Hashable:
    """Equal for tensors that take the same room."""
    if isinstance(source, OutlineCheckpoint):
        return source.tensor_format(name)
    weight = source.weight(name)
    return weight.shape, weight.kind, getattr(weight, "group", 0)


def first_expert(name: str) -> str:
    """The name of the same tensor of the layer's first expert; a name that is not an expert's remains."""
    if "_exps." not in name:
        return name
    part, expert, suffix = split_name(name)
    return name if expert is None else f"{part}.0.{suffix}"


def _by_expert(name: str) -> bool:
    """True if the tensor has a row for each expert."""
    return ".ffn_gate_inp." in name or ".exp_probs_b." in name
