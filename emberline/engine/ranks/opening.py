"""The rank group that a worker is started with: followers are started or awaited, or rank 0 is joined."""

import argparse
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from emberline import __version__
from emberline.engine.addresses import TOKEN_VARIABLE, free_address, listening
from emberline.engine.core.plan import Runner
from emberline.engine.core.rank import Executor
from emberline.engine.ranks.collectives import open_collectives
from emberline.engine.ranks.flags import follower_command
from emberline.engine.ranks.follower_processes import FollowerProcesses
from emberline.engine.ranks.formation import FORM_S, Rendezvous, join_group
from emberline.engine.ranks.messages import KVReport, RankFacts
from emberline.engine.ranks.plan_channel import PlanWriter
from emberline.engine.ranks.plan_ring import RingWriter, is_supported
from emberline.engine.ranks.rank_group import Leader, Member, RankGroup
from emberline.engine.ranks.rank_runner import FollowerLoop, LeaderRunner
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.manager import FLUSH_S, TierManager
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.manager import TransferManager
from emberline.models.shard import Shard, check_layout
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout, StageSplit
from emberline.weights.checkpoint import Checkpoint
from emberline.weights.stage_balance import split_stages

MAX_FOLDER_BYTES = 64  # beside which a socket's path is no longer than the system allows


def open_group(
    args: argparse.Namespace, layout: Layout, checkpoint: Checkpoint, device: str
) -> tuple[RankGroup, Shard]:
    """Form the group before weights are loaded, and find the part of the model that is this rank's."""
    config = checkpoint.config
    check_layout(config, layout)
    stages = StageSplit(args.stages) if args.stages else split_stages(checkpoint, layout.pp)
    stages.check(config.n_layers, layout.pp)
    facts = RankFacts(
        version=__version__,
        torch=str(torch.__version__),
        fingerprint=checkpoint.fingerprint,
        layout=layout,
        bounds=stages.bounds,
        device=device_kind(device),
        deterministic=args.deterministic,
        max_running=args.max_running,
        token_budget=args.token_budget,
        kv_host_bytes=args.kv_host_bytes or 0,
        kv_disk_bytes=args.kv_disk_bytes,
    )
    group = _lead(args, facts, device) if args.rank == 0 else _follow(args, facts, device)
    return group, Shard.of(config, layout, group.position, group.groups, stages)


def leader_runner(leader: Leader, runner: Runner, *, samples_everywhere: bool = False) -> LeaderRunner:
    """samples_everywhere: all ranks sample, as on GPUs that are not stages of a pipeline, or to draft."""
    pipelined = leader.layout.pp > 1
    return LeaderRunner(leader, runner, pipelined=pipelined, followers_sample=pipelined or samples_everywhere)


def follower_loop(
    member: Member,
    runner: Runner,
    executors: Mapping[str, Executor],
    steps_in_flight: int = 1,
    prepare: Callable[[], bool] | None = None,
    *,
    drafts: bool = False,
) -> FollowerLoop:
    """`prepare`: of a GPU. Without stages every rank samples there. drafts: a draft head or model runs here."""
    pipelined = member.layout.pp > 1
    reports = pipelined and member.rank == member.layout.sampling_rank
    samples = reports or drafts or (prepare is not None and not pipelined)
    return FollowerLoop(member, runner, samples, reports, steps_in_flight, prepare, executors)


def lead_kv(leader: Leader, transfers: GroupTransfers, tiers: GroupTiers | None) -> None:
    """Pass what followers report on to the transfers and the tiers of the group."""

    def on_report(rank: int, report: KVReport) -> None:
        transfers.report(rank, report.transfers)
        if tiers is not None:
            tiers.report(rank, report.tiers)

    leader.on_report = on_report
    if tiers is not None:
        leader.end_s += FLUSH_S  # for followers to write what they have saved


def follow_kv(member: Member, transfers: TransferManager | None, tiers: TierManager | None) -> Mapping[str, Executor]:
    """Return a follower's executors of orders by feature: none if only the runner reaches its KV pools."""
    if transfers is None:
        return {}
    transfers.join(member.rank, member.slices)
    return {"transfers": transfers} if tiers is None else {"transfers": transfers, "tiers": tiers}


def rank_device(device: str, rank: int, n_ranks: int) -> str:
    """The device of a rank: of several GPUs each has its own. BadInput: there are fewer than ranks."""
    if not device.startswith("cuda") or ":" in device:
        return device
    n_gpus = torch.cuda.device_count()
    if n_gpus >= n_ranks:
        return f"cuda:{rank}"
    if os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1":  # tests: several ranks on one GPU
        return f"cuda:{rank % n_gpus}"
    raise BadInput(
        f"{n_ranks} ranks need as many GPUs, and there {'is' if n_gpus == 1 else 'are'} {n_gpus}", param="tp"
    )


def device_kind(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def private_folder(address: str) -> Path:
    """Only for this user, for sockets and the store of a group: beside a worker's Unix socket, whose folder the
    supervisor removes also after a worker that was killed."""
    beside = None if address.startswith("tcp:") else Path(address.removeprefix("unix:")).absolute().parent
    if beside is None or len(str(beside)) > MAX_FOLDER_BYTES or not beside.is_dir():
        beside = None
    return Path(tempfile.mkdtemp(prefix="emberline-ranks-", dir=beside))


def _lead(args: argparse.Namespace, facts: RankFacts, device: str) -> Leader:
    layout, n_followers = facts.layout, facts.layout.n_ranks - 1
    token = os.environ.get(TOKEN_VARIABLE, "") or secrets.token_hex(16)
    if args.rendezvous and not os.environ.get(TOKEN_VARIABLE):
        raise BadInput(f"--rendezvous needs a join token, the same for all ranks, in {TOKEN_VARIABLE}")
    folder = private_folder(args.socket)
    address = args.rendezvous or f"unix:{folder / 'ranks.sock'}"
    ring = RingWriter(n_followers) if is_supported() else None
    started: FollowerProcesses | None = None
    try:
        with listening(address) as (listener, bound):
            if not args.rendezvous:
                command = follower_command(args.command)
                started = FollowerProcesses(command, range(1, layout.n_ranks), bound, token)
            remote = bound.startswith("tcp:")
            store = free_address(bound) if remote else f"file:{folder / 'store'}"
            rendezvous = Rendezvous(listener, facts, token, store, ring)
            connections = rendezvous.wait(FORM_S, started.check if started is not None else lambda: None)
        own_host, limit_s = _own_host(bound), args.step_timeout
        groups = open_collectives(store, layout, 0, device, own_host, limit_s, deterministic=args.deterministic)
    except BaseException:
        if started is not None:
            started.kill()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    by_connection = [each for each in connections if not (each.local and ring is not None)]
    plans = PlanWriter(ring if len(by_connection) < n_followers else None, by_connection)
    return Leader(layout, groups, connections, plans, started, folder, args.step_timeout)


def _follow(args: argparse.Namespace, facts: RankFacts, device: str) -> Member:
    token = os.environ.get(TOKEN_VARIABLE, "")
    connection, welcome, plans = join_group(args.rendezvous, args.rank, token, facts)
    layout, host, limit_s = facts.layout, connection.local_host, args.step_timeout
    groups = open_collectives(welcome.store, layout, args.rank, device, host, limit_s, deterministic=args.deterministic)
    return Member(layout, args.rank, groups, connection, plans)


def _own_host(address: str) -> str:
    return address.removeprefix("tcp:").rpartition(":")[0] if address.startswith("tcp:") else "127.0.0.1"
