"""Bytes of a block that one rank has and another one needs, and the pairs of ranks that send and receive them.

A rank has a slice of every block: some layers, KV heads and tokens (`KVGroup`). Ranks of groups that are divided alike
have the same slices, and whole blocks go from one to the other; else a block goes in runs of bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import msgspec

from emberline.protocol.block_hash import KVGroup

Slices = tuple[KVGroup, ...]  # of one rank: per KV group


class SliceMismatch(Exception):
    """The blocks of two engines cannot be made from each other; the text says why."""


class ByteRun(NamedTuple):
    """Contiguous bytes, in a block of the sender and in one of the receiver."""

    source: int
    target: int
    n_bytes: int


@lru_cache(256)
def runs(source: KVGroup, target: KVGroup) -> tuple[ByteRun, ...]:
    """Return the bytes that both slices have, in ascending order.

    Raises SliceMismatch if they are of different models, or not comparable.
    """
    if source.keys != target.keys:  # the C kernels store keys by channel; with --tp a CPU computes without them
        raise SliceMismatch(
            f"keys are stored by {source.keys} there, by {target.keys} here: give both --tp, or neither"
        )
    for field in ("name", "head_dim", "dtype", "window", "chunked", "planes"):
        if getattr(source, field) != getattr(target, field):
            raise SliceMismatch(f"{field} {getattr(source, field)} there, {getattr(target, field)} here")
    if source.tokens != target.tokens and source.keys != "token":
        raise SliceMismatch("keys that are stored by channel cannot be divided by tokens")
    layers = [layer for layer in source.layers if layer in target.layers]
    heads = _common((source.first_head, source.first_head + source.kv_heads),
                    (target.first_head, target.first_head + target.kv_heads))  # fmt: skip
    tokens = _common(source.tokens, target.tokens)
    found: list[ByteRun] = []
    for layer, plane, head in product(layers, range(source.planes), heads) if tokens else ():
        at = (_offset(source, layer, plane, head, tokens.start), _offset(target, layer, plane, head, tokens.start))
        n_bytes = len(tokens) * source.row_bytes[plane]
        last = found[-1] if found else ByteRun(-1, -1, 0)
        if (last.source + last.n_bytes, last.target + last.n_bytes) == at:
            found[-1] = ByteRun(last.source, last.target, last.n_bytes + n_bytes)
        else:
            found.append(ByteRun(at[0], at[1], n_bytes))
    return tuple(found)


def block_runs(sender: Slices, receiver: Slices) -> tuple[tuple[ByteRun, ...], ...] | None:
    """Return the runs of each group, or None if both ranks have the same slices: whole blocks are sent."""
    if sender == receiver:
        return None
    if len(sender) != len(receiver):
        raise SliceMismatch(f"{len(sender)} KV groups there, {len(receiver)} here")
    return tuple(runs(source, target) for source, target in zip(sender, receiver))


@lru_cache(64)
def routes(senders: tuple[Slices, ...], receivers: tuple[Slices, ...]) -> tuple[tuple[int, int], ...]:
    """Return the pairs (sender, receiver) of ranks. Of ranks that hold the same, one sends to each receiver: the one
    of the receiver's own number if there is one, since groups that share GPUs have these two on the same one.

    Ranks that hold the same of some groups only, as of a draft model that each has whole, all send it: the same bytes.

    Raises SliceMismatch if some receiver would lack a part of its blocks.
    """
    alike: dict[Slices, list[int]] = {}
    for rank, slices in enumerate(senders):
        alike.setdefault(slices, []).append(rank)
    found: list[tuple[int, int]] = []
    for receiver, wanted in enumerate(receivers):
        sent: list[list[ByteRun]] = [[] for _ in wanted]
        for slices, ranks in alike.items():
            parts = block_runs(slices, wanted) or tuple((ByteRun(0, 0, group.block_bytes),) for group in wanted)
            if any(run.n_bytes for each in parts for run in each):
                for own, each in zip(sent, parts):
                    own += each
                found.append((receiver if receiver in ranks else ranks[receiver % len(ranks)], receiver))
        for group, received in zip(wanted, sent):
            if (n := _covered(received)) != group.block_bytes:
                raise SliceMismatch(f"{n} of the {group.block_bytes} bytes of {group.tag} are sent")
    return tuple(found)


def whole(ranks: Sequence[Slices]) -> Slices:
    """Return the groups of blocks that are not divided, of which each rank has a slice."""
    return tuple(map(_whole, zip(*ranks)))


def _whole(slices: tuple[KVGroup, ...]) -> KVGroup:
    some = next((each for each in slices if each.layers), slices[0])
    first = min(each.first_head for each in slices)
    return msgspec.structs.replace(
        some,
        layers=tuple(sorted({layer for each in slices for layer in each.layers})),
        first_head=first,
        kv_heads=max(each.first_head + each.kv_heads for each in slices) - first,
        tokens=(min(each.tokens[0] for each in slices), max(each.tokens[1] for each in slices)),
    )


def copy(source: KVGroup, data: bytes | memoryview, target: KVGroup, into: bytearray | memoryview) -> None:
    """Copy what both slices have of a block from one to the other."""
    taken, given = memoryview(data), memoryview(into)
    if source == target:
        given[:] = taken
        return
    for run in runs(source, target):
        given[run.target : run.target + run.n_bytes] = taken[run.source : run.source + run.n_bytes]


def _covered(sent: Sequence[ByteRun]) -> int:
    """Bytes of a receiver's block that some run writes."""
    n, end = 0, 0
    for run in sorted(sent, key=lambda run: run.target):
        after = run.target + run.n_bytes
        n += max(0, after - max(end, run.target))
        end = max(end, after)
    return n


def _common(one: tuple[int, int], other: tuple[int, int]) -> range:
    return range(max(one[0], other[0]), min(one[1], other[1]))


def _offset(group: KVGroup, layer: int, plane: int, head: int, token: int) -> int:
    """Return the offset in bytes of a token in a block: [layers, planes, kv_heads, tokens, head_dim]."""
    n_tokens, rows = group.tokens[1] - group.tokens[0], group.row_bytes
    before = group.layers.index(layer) * sum(rows) + sum(rows[:plane])  # bytes of a token of one head
    at = (head - group.first_head) * n_tokens + token - group.tokens[0]
    return before * group.kv_heads * n_tokens + at * rows[plane]
