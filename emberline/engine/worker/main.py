"""The engine process: `python -m emberline.engine.worker --model PATH --socket ADDRESS`."""

import argparse
import gc
import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from emberline import log
from emberline.engine.addresses import TOKEN_VARIABLE, listening, positive
from emberline.engine.cache_control import StoredCache
from emberline.engine.core.limits import Limits
from emberline.engine.core.prefill_policy import BatchTimeLimit
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.encoders.encoder_loop import EncoderLimits, EncoderLoop
from emberline.engine.encoders.speech import Transcriber
from emberline.engine.encoders.speech_loop import SpeechLoop
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.memory import default_kv_bytes, free_host_bytes
from emberline.engine.ranks.flags import add_arguments as add_parallel_arguments
from emberline.engine.ranks.flags import check_features, command_of, layout_of, threads_of_rank
from emberline.engine.speculation.opening import add_arguments as add_draft_arguments
from emberline.engine.speculation.opening import open_drafting
from emberline.engine.speculation.speculator import AUTO, SETTINGS, open_speculator
from emberline.engine.tiers.opening import add_arguments as add_tier_arguments
from emberline.engine.tiers.opening import open_tiers, stored_cache
from emberline.engine.worker import cpu_share as cpu_shares
from emberline.engine.worker import process
from emberline.engine.worker.alive_file import open_alive_file
from emberline.engine.worker.announcer import open_joining
from emberline.engine.worker.build import build_scheduler
from emberline.engine.worker.socket_server import Server
from emberline.engine.worker.start_timeline import StartTimeline
from emberline.kernels.gpu.compile_server import CompileServer, hash_compiler, load_driver, start_server
from emberline.kernels.native_library import private_cache_dir
from emberline.kv.cache import KVCache
from emberline.kv.groups import split_bytes
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.mover import HostMover
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.kv.transfer.manager import TransferManager
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo
from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import ModelConfig
from emberline.weights.readahead import ReadAhead, model_files
from emberline.weights.task_config import TaskConfig, read_json, task_of
from emberline.weights.whisper_files import CONTEXT_LEN, read_whisper

if TYPE_CHECKING:
    from emberline.engine.ranks.follower_kv import KVListener
    from emberline.engine.ranks.rank_group import RankGroup

CPU_DEFAULTS = {"max_running": 64, "token_budget": 512}
ENCODER_TOKENS, GPU_ENCODER_TOKENS = 1024, 16_384  # of a step: more makes others wait longer and computes no faster
ENCODER_RUNNING = 256  # requests
SPEECH_RUNNING = 4  # they take turns: more would only hold more decoded audio
GPU_DEFAULTS = {"max_running": 256, "token_budget": 8192}

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    log.setup("engine", extra={"rank": args.rank} if args.rank else None)  # followers write to rank 0's log
    parent = process.Parent()  # before the model is loaded, which takes seconds
    process.end_on_signals()
    timeline = StartTimeline()
    try:
        with ExitStack() as group:
            if args.rank:
                follow(args, timeline, by_rank_0=parent.is_engine)
                return 0
            joining, alive_file = open_joining(args), open_alive_file(args.alive_file)
            token = process.join_token(args.socket) if joining is None else joining.token
            loop, info, facts, transfers, stored = build(args, timeline, group)
            gc.freeze()  # permanent objects: collections between steps need not scan them
            secure = None if joining is None else joining.secure(transfers)
            with listening(args.socket) as (listener, address):
                accept = None if transfers is None else transfers.accept
                server = Server(listener, loop, info, token, secure, alive_file, None, stored, accept)
                server.on_role = priority = process.NicePrefill(args.prefill_nice)
                priority(info.role, is_first=True)
                timeline.end("socket")
                facts |= {"id": args.id, "address": address, "load_s": round(sum(timeline.seconds.values()), 3)}
                timeline.log()
                _log.info("serving %s", info.model, extra=facts)
                announcer = None if joining is None else joining.announcer(info, address)
                return process.serve(server, parent, facts, announcer)
    except Exception as error:
        return process.fail(error)


def follow(args: argparse.Namespace, timeline: StartTimeline, *, by_rank_0: bool) -> None:
    """Rank 1 and up of a group: compute what rank 0 plans, until it ends. Where rank 0 has started it, signals to both
    are rank 0's to handle, which drains; started by hand, it ends at once, and the group with it."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if by_rank_0 else signal.SIG_DFL)
    if not by_rank_0:
        process.end_on_signals()
    args.by_rank_0 = by_rank_0
    with ExitStack() as group:
        loop = _build(args, timeline, group)[0]
        gc.freeze()
        assert not isinstance(loop, StepLoop | EncoderLoop | SpeechLoop), "rank 0 alone has a step loop"
        loop.run()


class Engine(NamedTuple):
    """A model that is loaded, and the loop that serves it."""

    loop: StepLoop | EncoderLoop | SpeechLoop
    info: EngineInfo
    facts: dict[str, Any]  # for the log and the ready line
    transfers: TransferManager | None = None
    stored: StoredCache | None = None


def build(args: argparse.Namespace, timeline: StartTimeline | None = None, group: ExitStack | None = None) -> Engine:
    """Load the model and build its step loop. The caller closes `group`, which ends the other ranks."""
    loop, *parts = _build(args, timeline or StartTimeline(), group or ExitStack())
    assert isinstance(loop, StepLoop | EncoderLoop | SpeechLoop), "followers have no step loop"
    return Engine(loop, *parts)


def _build(args: argparse.Namespace, timeline: StartTimeline, closing: ExitStack) -> Any:
    if args.device not in ("auto", "cpu") and not args.device.startswith("cuda"):
        raise BadInput(f"--device is auto, cpu or cuda, not {args.device}")
    layout = layout_of(args)
    check_features(args, layout)
    task = task_of(args.model)
    if layout.n_ranks > 1 and task.task != "generate":
        _log.warning(
            "only models that generate text are divided: one rank computes this one", extra={"task": task.task}
        )
    if task.task == "transcribe":
        return _build_speech(args)
    if task.task != "generate":
        return _build_encoder(args, task)
    ahead = _read_ahead(args)
    checkpoint = _open_checkpoint(args)
    timeline.end("checkpoint")
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(private_cache_dir() / "triton")
    compile_server = None
    if _expects_cuda(args):
        compile_server = start_server(checkpoint.fingerprint)
        hash_compiler()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    with process.without_collections():
        import torch  # takes a second or more: not before a start that fails

        from emberline.models.registry import begin_loading, select_device

    timeline.end("torch")
    device = select_device(args.device)
    group, shard = None, None
    if layout.n_ranks > 1:
        from emberline.engine.ranks.opening import rank_device

        device = rank_device(device, args.rank, layout.n_ranks)
        args.threads = threads_of_rank(args.threads, layout) if device == "cpu" else args.threads
    timeline.end("device")
    _set_defaults(args, device)
    if layout.n_ranks > 1:
        from emberline.engine.ranks.opening import open_group

        group, shard = open_group(args, layout, checkpoint, device)
        closing.callback(group.close)
        timeline.end("ranks")
    if device.startswith("cuda"):
        load_driver()
    if device.startswith("cuda") and not args.deterministic:
        from emberline.engine.runners.gpu.engine import load_attention

        load_attention(device)
    fingerprint = checkpoint.fingerprint
    with ExitStack() as reading:
        try:
            model, weights = begin_loading(checkpoint, device, args.deterministic, args.threads, ahead, shard)
            if weights is not None:
                reading.enter_context(weights)
            if model.backend == "native":
                torch.set_num_threads(1)  # the kernels have their own threads; torch's would compete for the cores
            elif args.threads is not None:
                torch.set_num_threads(args.threads)
            timeline.end("model")
            receives = _open_listener(args, group, closing)
            loop, cache, limits, preparation, own_transfers, stored = _step_loop(
                model, fingerprint, device, args, compile_server, group, "" if receives is None else receives.address
            )
            timeline.end("memory")
        except torch.OutOfMemoryError:
            _check_fits(checkpoint, device, args)
            raise
        if preparation is not None:
            preparation.begin()
            timeline.end("steps")
        if weights is not None:
            weights.finish()
            timeline.end("weights")
        if preparation is not None:
            preparation.finish()
            timeline.end("steps")
    checkpoint.close()
    if ahead is not None:
        ahead.release()
    timeline.end("release")
    if group is not None and args.rank == 0:
        group.start()  # a follower says that it is ready when it runs
        timeline.end("ranks")

    receives_by = process.receive_transports(own_transfers, args)
    if group is not None and args.join:
        receives_by = ()  # followers have no certificate: others cannot send to them
    info = EngineInfo(
        model=args.name or args.model.stem,
        fingerprint=fingerprint,
        context_len=limits.context_len,
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_ids,
        kv_groups=tuple(group.layout for group in cache.groups),
        kv_tokens=cache.n_tokens,
        device=device,
        backend=model.backend,
        max_running=limits.max_running,
        role=args.role,
        transfers=receives_by,
        layout=layout,
        ranks=getattr(group, "endpoints", ()),
    )
    if receives is not None and own_transfers is not None:
        receives.serve(own_transfers, info, getattr(group, "token", ""))
    facts = {name: getattr(info, name) for name in ("model", "role", "device", "backend", "context_len", "kv_tokens")}
    if group is not None:
        facts["layout"] = layout.name
    facts["kv_bytes"] = sum((group.pool.n_total + 1) * group.layout.block_bytes for group in cache.groups)
    return loop, info, facts, own_transfers, stored


def _open_listener(args: argparse.Namespace, group: "RankGroup | None", closing: ExitStack) -> "KVListener | None":
    """Where a follower receives KV: it tells rank 0 before it is loaded."""
    if group is None or args.rank == 0:
        return None
    from emberline.engine.ranks.follower_kv import KVListener, rank_address

    return KVListener(rank_address(args.socket, args.rank, by_rank_0=args.by_rank_0), closing)


def _build_encoder(args: argparse.Namespace, task: TaskConfig) -> tuple[EncoderLoop, EngineInfo, dict[str, Any]]:
    with process.without_collections():
        import torch

        from emberline.models.registry import load_encoder, select_device

    device = select_device(args.device)
    checkpoint = open_checkpoint(args.model)
    model = load_encoder(checkpoint, device, args.threads)
    if model.backend == "native":
        torch.set_num_threads(1)
    elif args.threads is not None:
        torch.set_num_threads(args.threads)
    config = checkpoint.config
    limits = EncoderLimits(
        vocab_size=config.vocab_size,
        max_len=min(config.context_len, task.max_len or config.context_len),
        token_budget=args.token_budget or (ENCODER_TOKENS if device == "cpu" else GPU_ENCODER_TOKENS),
    )
    cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, _thread_setter(model.backend))
    loop = EncoderLoop(model, limits, classifies=task.task != "embed", cpu_share=cpu_share)
    checkpoint.close()
    info = EngineInfo(
        model=args.name or args.model.stem,
        fingerprint=checkpoint.fingerprint,
        context_len=limits.max_len,
        vocab_size=config.vocab_size,
        eos_ids=(),
        device=device,
        backend=model.backend,
        max_running=args.max_running or ENCODER_RUNNING,
        task=task.task,
    )
    return loop, info, {name: getattr(info, name) for name in ("model", "task", "device", "backend", "context_len")}


def _build_speech(args: argparse.Namespace) -> tuple[SpeechLoop, EngineInfo, dict[str, Any]]:
    files = read_whisper(args.model)
    device = args.device if args.device != "auto" else "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    model = Transcriber(args.model, device, args.threads or 0)
    info = EngineInfo(
        model=args.name or args.model.stem,
        fingerprint=files.fingerprint,
        context_len=CONTEXT_LEN,
        vocab_size=files.vocab_size,
        eos_ids=(),
        device=device,
        backend="ctranslate2",
        max_running=args.max_running or SPEECH_RUNNING,
        task="transcribe",
    )
    facts = {name: getattr(info, name) for name in ("model", "task", "device", "backend")}
    # The model's threads are fixed; the share tells the other workers that they compute.
    cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, lambda n_threads: None)
    return SpeechLoop(model, tuple(model.languages), cpu_share=cpu_share), info, facts


def _open_checkpoint(args: argparse.Namespace) -> Checkpoint:
    if args.random_weights is None:
        return open_checkpoint(args.model)
    return generate_checkpoint(read_json(args.model, "config.json"), args.random_weights)


def _expects_cuda(args: argparse.Namespace) -> bool:
    """Known before torch is imported."""
    return args.device != "cpu" and Path("/dev/nvidiactl").exists()


def _read_ahead(args: argparse.Namespace) -> ReadAhead | None:
    """For an accelerator the whole checkpoint is read once: begin before torch is imported."""
    if not _expects_cuda(args) or args.random_weights is not None:
        return None
    return ReadAhead(model_files(args.model), free_host_bytes() // 2)


def _set_defaults(args: argparse.Namespace, device: str) -> None:
    for name, value in (CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.max_running > args.token_budget:
        raise BadInput("--token-budget must be at least --max-running: each sequence takes one token per step")


def _step_loop(
    model: Any,
    fingerprint: str,
    device: str,
    args: argparse.Namespace,
    compile_server: CompileServer | None = None,
    group: "RankGroup | None" = None,
    address: str = "",
) -> Any:
    from emberline.engine.ranks.follower_kv import FollowerKV
    from emberline.engine.ranks.opening import follower_loop, lead_kv, leader_runner
    from emberline.engine.ranks.rank_group import Member
    from emberline.engine.runners.cpu.torch_runner import TorchRunner

    drafting = open_drafting(model, fingerprint, args)
    head, kv_groups = drafting.head, (*model.kv_groups, *drafting.kv_groups)

    def caches(kv_bytes: int) -> tuple[list[int], KVCache, Limits]:
        n_blocks = split_bytes(kv_groups, kv_bytes, args.token_budget, args.max_running)
        if group is not None:
            said = address if isinstance(group, Member) else os.environ.get(TOKEN_VARIABLE, "")
            n_blocks = group.agree(kv_groups, list(n_blocks), said)
        cache = KVCache(kv_groups, n_blocks, chunk=args.token_budget)
        return n_blocks, cache, _limits(model.config, cache, args)

    if model.backend != "triton":
        n_ranks = 1 if group is None else group.layout.n_ranks
        n_blocks, cache, limits = caches((args.kv_bytes or default_kv_bytes(device)) // n_ranks)
        prefill = BatchTimeLimit()
        cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, _thread_setter(model.backend))
        runner = TorchRunner(model, n_blocks, limits, device, prefill, args.role != "both", cpu_share, head)
        own_transfers, own_tiers = None, None
        slices = () if group is None else group.slices
        if runner.memory is not None:
            mooncake = process.mooncake_engine(runner.memory, args)
            own_transfers = host_transfers(fingerprint, kv_groups, runner.memory, mooncake)
            own_tiers = open_tiers(args, fingerprint, kv_groups, HostMover(runner.memory), ranks=slices)
        if isinstance(group, Member):
            kv = None if own_transfers is None else FollowerKV(group, own_transfers, own_tiers)
            return follower_loop(group, runner, kv), cache, limits, None, own_transfers, None
        transfers = None if own_transfers is None else GroupTransfers(own_transfers, slices)
        tiers = None if own_tiers is None else GroupTiers(own_tiers, n_ranks)
        if group is not None and transfers is not None:
            lead_kv(group, transfers, tiers)
        compiler = MatcherCompiler(limits.vocab_size)
        n_steps = 1 if group is None else group.layout.pp
        setting = "off" if n_steps > 1 and args.speculation == AUTO else args.speculation
        speculation = open_speculator(setting, device, head=drafting.drafter)
        scheduler = build_scheduler(
            cache, limits, fingerprint, compiler, prefill, transfers, speculation, tiers, n_steps
        )
        stored = stored_cache(args, fingerprint, kv_groups, tiers)
        launching, publish = (runner, None) if group is None else (leader_runner(group, runner), group.publish_plan)
        loop = StepLoop(scheduler, launching, n_steps, None, publish)
        return loop, cache, limits, None, own_transfers, stored
    from emberline.engine.runners.gpu.draft_model_chain import pool_blocks
    from emberline.engine.runners.gpu.engine import GpuEngine
    from emberline.engine.runners.gpu.preparation import StepPreparation
    from emberline.engine.runners.gpu.tiers import CudaMover, PinnedAllocator
    from emberline.engine.runners.gpu.transfer import device_transfers, exported_pools

    n_ranks = model.shard.layout.n_ranks
    samples = args.role != "prefill" or args.join  # in a cluster, its role may change
    setting = args.speculation if samples or args.speculation != AUTO else "off"
    speculation = open_speculator(setting, device, head=drafting.drafter, n_ranks=n_ranks)
    limits, speculates = _limits(model.config, None, args), speculation is not None
    engine = GpuEngine.open(model, limits, device, args.kv_bytes, args.memory_share, speculates, head)
    n_blocks, cache, limits = caches(engine.memory.kv)
    sizes = pool_blocks(n_blocks, limits.max_running, head)
    exports = args.role != "both" or (group is None and args.join)  # in a cluster, its role may change
    pools, spans = exported_pools(kv_groups, sizes, device) if exports else (None, [])
    gpu_runner = engine.runner(n_blocks, limits, pools=pools)
    timed = None if speculation is None else speculation.calibrate
    preparation = StepPreparation(model, gpu_runner, limits, compile_server, timed)
    own_transfers = device_transfers(fingerprint, kv_groups, gpu_runner.pools, spans)
    mover = CudaMover(gpu_runner.pools, kv_groups)
    slices = () if group is None else group.slices
    own_tiers = open_tiers(args, fingerprint, kv_groups, mover, PinnedAllocator(device), slices)
    if isinstance(group, Member):
        kv = FollowerKV(group, own_transfers, own_tiers)
        following = follower_loop(group, gpu_runner, kv, engine.steps_in_flight, preparation.next)
        return following, cache, limits, preparation, own_transfers, None
    transfers = GroupTransfers(own_transfers, slices)
    tiers = None if own_tiers is None else GroupTiers(own_tiers, n_ranks)
    if group is not None:
        lead_kv(group, transfers, tiers)
    compiler, n_stages = MatcherCompiler(limits.vocab_size), model.shard.layout.pp
    scheduler = build_scheduler(
        cache, limits, fingerprint, compiler, engine.prefill, transfers, speculation, tiers, micro_batches=n_stages
    )
    stored = stored_cache(args, fingerprint, kv_groups, tiers)
    if group is not None:
        leading = leader_runner(group, gpu_runner, samples_everywhere=True)
        idle_task = leading.idle_task(preparation.next)
        n_steps, publish = engine.steps_in_flight, group.publish_plan
        loop = StepLoop(scheduler, leading, n_steps, idle_task, publish)
        return loop, cache, limits, preparation, own_transfers, stored
    loop = StepLoop(scheduler, gpu_runner, engine.steps_in_flight, preparation.next)
    return loop, cache, limits, preparation, own_transfers, stored


def _check_fits(checkpoint: Checkpoint, device: str, args: argparse.Namespace) -> None:
    """Raise BadInput that says by how much a model is too large for the GPU, whose memory has run out."""
    from emberline.engine.runners.gpu.engine import check_fits
    from emberline.models.registry import lay_out

    limits = _limits(checkpoint.config, None, args)
    check_fits(lay_out(checkpoint), limits, device, args.kv_bytes, args.memory_share)


def _thread_setter(backend: str) -> Callable[[int], None]:
    if backend == "native":
        from emberline.kernels.cpu.native_backend import set_threads

        return set_threads
    import torch

    return torch.set_num_threads


def _limits(config: ModelConfig, cache: KVCache | None, args: argparse.Namespace) -> Limits:
    capacity = config.context_len if cache is None else cache.capacity
    if cache is not None and cache.capacity < config.context_len:
        _log.warning("the KV cache holds %d of the model's %d tokens", cache.capacity, config.context_len)
    return Limits(
        context_len=min(config.context_len, capacity),
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        max_running=args.max_running,
        token_budget=args.token_budget,
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return value


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = process.arguments("emberline.engine.worker", "Serve one model on one socket.")
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a GGUF file or a checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.set_defaults(max_running=None, token_budget=None)  # depend on the device
    parser.add_argument(
        "--kv-bytes", type=positive, metavar="N", help="size of the KV cache; default: from the free memory"
    )
    parser.add_argument(
        "--memory-share",
        type=_share,
        default=1.0,
        metavar="F",
        help="of the GPU's memory, for weights, KV and all else",
    )
    parser.add_argument(
        "--random-weights", type=int, metavar="SEED", help="for a folder with config.json only: to measure, not to use"
    )
    add_draft_arguments(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads; default: one per core")
    parser.add_argument(
        "--cpu-share", metavar="FILE:SLOT", help="use fewer threads while other workers compute; all have the same file"
    )
    add_tier_arguments(parser)
    add_parallel_arguments(parser)
    parser.add_argument(
        "--speculation", choices=SETTINGS, default=AUTO, help="drafters of speculative decoding: all, none, or one"
    )
    parser.add_argument("--deterministic", action="store_true", help="the same tokens whatever else is in the batch")
    args = parser.parse_args(argv)
    args.command = command_of(argv)  # which rank 0 starts its followers with
    return args
