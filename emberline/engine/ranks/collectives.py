"""The collectives that a group uses: gloo between CPUs, memory that all ranks map or NCCL between GPUs."""

from collections.abc import Callable, Sequence

from emberline.engine.ranks.gloo import GlooCollectives, Store, open_store
from emberline.kernels.collectives import Collectives, NoCollectives, ParallelGroups, Stages
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout

_MEET_S = 120.0  # for all ranks to find each other

OpenGroup = Callable[[str, int, int], Collectives]  # name, our number in it, its size
OpenStages = Callable[[str, int, int], Stages]


def open_collectives(
    store: str, layout: Layout, rank: int, device: str, host: str, timeout_s: float, *, deterministic: bool = False
) -> ParallelGroups:
    """Open the collectives of one rank. Blocks until the other ranks call it, too.

    `host` is our address for them, `timeout_s` the limit of a collective."""
    meeting = open_store(store, layout.n_ranks, rank == 0, _MEET_S)
    if device.startswith("cuda"):
        one_machine = store.startswith("file:")
        return open_groups(layout, rank, *_cuda(meeting, layout, rank, device, timeout_s, one_machine, deterministic))

    def gloo(name: str, number: int, size: int) -> GlooCollectives:
        return GlooCollectives(meeting, name, number, size, host, timeout_s, _MEET_S)

    return open_groups(layout, rank, gloo, gloo)


def open_groups(layout: Layout, rank: int, opened: OpenGroup, stages: OpenStages) -> ParallelGroups:
    """The groups of one rank of a layout; those of one rank need no collectives."""

    def group(name: str, ranks: Sequence[int]) -> Collectives:
        return NoCollectives() if len(ranks) == 1 else opened(name, ranks.index(rank), len(ranks))

    position = layout.position(rank)
    stage = layout.stage_ranks(position.stage)
    first = position.tp_rank // layout.dcp * layout.dcp
    tp = group(f"tp{position.stage}", stage)
    return ParallelGroups(
        tp=tp,  # all of whose ranks may divide the tokens, too: NCCL takes half a gigabyte for a group
        dcp=tp if layout.dcp == layout.tp else group(f"dcp{position.stage}.{first}", stage[first : first + layout.dcp]),
        pp=NoCollectives() if layout.pp == 1 else stages(f"pp{position.tp_rank}", position.stage, layout.pp),
    )


def _cuda(
    store: Store, layout: Layout, rank: int, device: str, timeout_s: float, one_machine: bool, deterministic: bool
) -> tuple[OpenGroup, OpenStages]:
    """On one machine small messages go through memory that all ranks map; in deterministic mode all do, since NCCL's
    order of sums depends on the size of a message. Stages send by NCCL, which needs no GPU that reaches the others."""
    from emberline.engine.ranks.nccl import NcclCollectives, NcclStages, shares_gpus
    from emberline.engine.ranks.peer_memory import PeerMemory, PeerStages, has_own_device

    own = has_own_device(store, rank, range(layout.n_ranks), device) or shares_gpus()
    if not own and not one_machine:
        raise BadInput("ranks can share a GPU on one machine only, for tests", param="tp")

    def group(name: str, number: int, size: int) -> Collectives:
        nccl = NcclCollectives(store, name, number, size, device, timeout_s) if own else None
        if nccl is not None and not one_machine:
            return nccl
        return PeerMemory(store, name, number, size, device, None if deterministic else nccl)

    def stages(name: str, number: int, size: int) -> Stages:
        if own:
            return NcclStages(store, name, number, size, device, timeout_s)
        return PeerStages(store, name, number, size, device)

    return group, stages
