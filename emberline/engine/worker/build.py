"""Construction of a worker: one sequence from a checkpoint to the loop that serves it, on a CPU and on GPUs.

Only `_open_cpu` and `_open_gpu` know the device: they open a runner, with the memory of its KV pools and what copies
their blocks. KV cache, tiers, transfers, features, scheduler and loop are built over them alike.
"""

import argparse
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from emberline.engine import composition
from emberline.engine.addresses import listening
from emberline.engine.cache_control import StoredCache
from emberline.engine.core.feature import Feature, Speculation
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import Runner
from emberline.engine.core.prefill_policy import BatchTimeLimit, PrefillPolicy
from emberline.engine.core.scheduler import Scheduler
from emberline.engine.core.step_loop import StepLoop
from emberline.engine.grammar.allowed_tokens import AllowedTokens
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.grammar.guide_jobs import GuideThreads
from emberline.engine.grammar.guided_decoding import GuidedDecoding
from emberline.engine.grammar.guided_rules import Guides
from emberline.engine.images.prompt_images import PromptImages
from emberline.engine.memory import default_kv_bytes, free_host_bytes
from emberline.engine.ranks.flags import layout_of, threads_of_rank
from emberline.engine.runners.cpu.runner import CpuRunner
from emberline.engine.runners.gpu.weight_storage import choose_on_device
from emberline.engine.scoring.prompt_logprobs import PromptScoring
from emberline.engine.speculation.opening import Drafting, open_drafting
from emberline.engine.speculation.speculator import AUTO, OFF, Speculator, open_speculator
from emberline.engine.tiers.opening import open_tiers, stored_cache
from emberline.engine.tiers.tiering import Tiering
from emberline.engine.transfer.handover import Handover
from emberline.engine.worker import cpu_share as cpu_shares
from emberline.engine.worker import process
from emberline.engine.worker.encoder_workers import open_encoder, open_speech
from emberline.engine.worker.socket_server import serve_senders
from emberline.engine.worker.start_timeline import StartTimeline
from emberline.kernels.gpu.compile_server import CompileServer, hash_compiler, load_driver, start_server
from emberline.kernels.native_library import private_cache_dir
from emberline.kv.cache import KVCache
from emberline.kv.groups import split_bytes
from emberline.kv.tiers.group_tiers import GroupTiers
from emberline.kv.tiers.host import Segment
from emberline.kv.tiers.mover import BlockMover, HostMover
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.kv.transfer.manager import TransferManager
from emberline.kv.transfer.mooncake import host_pools
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.credential import client_context, server_context
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo
from emberline.protocol.parallel_layout import Layout
from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.lossless_files import is_compressed
from emberline.weights.lossless_folder import verify_folder
from emberline.weights.model_config import ModelConfig
from emberline.weights.readahead import ReadAhead, model_files
from emberline.weights.task_config import read_json, task_of
from emberline.weights.vision_config import read_tower_config

if TYPE_CHECKING:
    from emberline.engine.encoders.encoder_loop import EncoderLoop
    from emberline.engine.encoders.speech_loop import SpeechLoop
    from emberline.engine.images.tower_loading import Images
    from emberline.engine.ranks.rank_group import RankGroup
    from emberline.engine.ranks.rank_runner import FollowerLoop
    from emberline.engine.runners.gpu.mooncake_probe import why_not_device_memory
    from emberline.engine.runners.gpu.preparation import StepPreparation

CPU_DEFAULTS = {"max_running": 64, "token_budget": 512}
GPU_DEFAULTS = {"max_running": 256, "token_budget": 8192}

_log = logging.getLogger(__name__)


class Engine(NamedTuple):
    """A model that is loaded, and the loop that serves it."""

    loop: "StepLoop | EncoderLoop | SpeechLoop"
    info: EngineInfo
    facts: dict[str, Any]  # for the log and the ready line
    transfers: TransferManager | None = None
    stored: StoredCache | None = None


class _Loaded(NamedTuple):
    """A model on its device, whose weights may still be read, and what drafts for it."""

    model: Any  # models.decoder.Decoder
    fingerprint: str
    device: str
    layout: Layout
    drafting: Drafting
    speculation: Speculator | None
    images: "Images | None" = None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """KV groups of the model, and after them those of its draft head or draft model."""
        return (*self.model.kv_groups, *self.drafting.kv_groups)


class _Opened(NamedTuple):
    """A runner, its KV cache, and what is specific to its device."""

    runner: Runner
    cache: KVCache
    limits: Limits
    prefill: PrefillPolicy
    transfers: TransferManager | None = None  # None: no other engine can read or write its pools
    mover: BlockMover | None = None  # copies blocks to tiers and back; None: it can have no tiers
    allocate: Callable[[int], Segment] | None = None  # host memory for tiers; None: any
    steps_in_flight: int = 1
    preparation: "StepPreparation | None" = None


# Takes the bytes of the KV cache. Returns the blocks of each KV group, for which every rank has memory.
Sizing = Callable[[int], tuple[list[int], KVCache, Limits]]


def build(args: argparse.Namespace, timeline: StartTimeline | None = None, closing: ExitStack | None = None) -> Engine:
    """Load the model of rank 0, or of an engine with one rank. `closing`: ends the other ranks when it is closed."""
    engine = _build(args, timeline or StartTimeline(), closing or ExitStack())
    assert isinstance(engine, Engine), "followers have no step loop"
    return engine


def build_follower(args: argparse.Namespace, timeline: StartTimeline, closing: ExitStack) -> "FollowerLoop":
    """Load the model of rank 1 and up."""
    loop = _build(args, timeline, closing)
    assert not isinstance(loop, Engine), "rank 0 alone has a step loop"
    return loop


def _build(args: argparse.Namespace, timeline: StartTimeline, closing: ExitStack) -> "Engine | FollowerLoop":
    if args.device not in ("auto", "cpu") and not args.device.startswith("cuda"):
        raise BadInput(f"--device is auto, cpu or cuda, not {args.device}")
    layout = layout_of(args)
    composition.check(composition.asked(args))
    task = task_of(args.model)
    if layout.n_ranks > 1 and task.task != "generate":
        _log.warning(
            "only models that generate text are divided: one rank computes this one", extra={"task": task.task}
        )
    if task.task == "transcribe":
        return Engine(*open_speech(args))
    if task.task != "generate":
        return Engine(*open_encoder(args, task))
    return _build_decoder(args, layout, timeline, closing)


def _build_decoder(
    args: argparse.Namespace, layout: Layout, timeline: StartTimeline, closing: ExitStack
) -> "Engine | FollowerLoop":
    """Build an engine that generates text, or a follower of one."""
    _verify_weights(args)
    if args.random_weights is None:
        checkpoint = open_checkpoint(args.model)
    else:
        checkpoint = generate_checkpoint(read_json(args.model, "config.json"), args.random_weights)
    ahead = _read_ahead(args)  # after headers and samples all over the files, which would wait for what is read ahead
    timeline.end("checkpoint")
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(private_cache_dir() / "triton")
    compile_server = None
    if _expects_cuda(args):
        compile_server = start_server(checkpoint.fingerprint)
        hash_compiler()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    with process.without_collections():
        from emberline.models.registry import begin_loading, expects_gpu, select_device

        timeline.end("imports")
        if expects_gpu(args.device):
            with suppress(ModuleNotFoundError):  # `select_device` then says what is missing
                import torch  # noqa: F401  (takes a second or more: not before a start that fails)
            timeline.end("torch")
    device = select_device(args.device)
    composition.check(composition.asked(args, device))
    group, shard = None, None
    if layout.n_ranks > 1:
        from emberline.engine.ranks.opening import open_group, rank_device

        device = rank_device(device, args.rank, layout.n_ranks)
        args.threads = threads_of_rank(args.threads, layout) if device == "cpu" else args.threads
    timeline.end("device")
    _set_defaults(args, device)
    if layout.n_ranks > 1:
        group, shard = open_group(args, layout, checkpoint, device)
        closing.callback(group.close)
        timeline.end("ranks")
    if device.startswith("cuda"):
        load_driver()
    if device.startswith("cuda") and not args.deterministic:
        from emberline.engine.runners.gpu.engine import load_attention

        load_attention(device)
    fingerprint = checkpoint.fingerprint
    limits = _limits(checkpoint.config, None, args)
    compress = choose_on_device(args.weights, checkpoint, shard, device, limits, args.kv_bytes, args.memory_share)
    with ExitStack() as reading:
        try:
            path = (args.model, fingerprint) if args.random_weights is None else None
            model, weights = begin_loading(
                checkpoint, device, args.deterministic, args.threads, ahead, shard, compress, path
            )
            if weights is not None:
                reading.enter_context(weights)
            cpu_shares.set_threads(model.backend, args.threads)
            timeline.end("model")
            listener, address = _listen(args, closing) if args.rank else (None, "")  # before rank 0 is told
            loaded = _load_drafters(model, checkpoint, device, args)
            loaded = loaded._replace(images=_load_tower(model, device, args))
            size = partial(_size_cache, loaded, args, group, address)
            opened = OPENERS.get(model.backend, _open_cpu)(loaded, args, size, compile_server)
            loop, stored = _build_loop(loaded, opened, args, group)
            timeline.end("memory")
        except RuntimeError as error:
            if device.startswith("cuda"):
                _explain_out_of_memory(error, checkpoint, device, args, compress)
            raise
        if opened.preparation is not None:
            opened.preparation.begin()
            timeline.end("steps")
        if weights is not None:
            weights.finish()
            timeline.end("weights")
        if opened.preparation is not None:
            opened.preparation.finish()
            timeline.end("steps")
    checkpoint.close()
    if ahead is not None:
        ahead.release_all()
    timeline.end("release")
    cache, limits, transfers = opened.cache, opened.limits, opened.transfers
    receives_by = process.receive_transports(transfers, args)
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
        images=None if loaded.images is None else loaded.images.processor,
    )
    if not isinstance(loop, StepLoop):  # a follower says that it is ready when it runs
        if listener is not None and transfers is not None:
            _receive_kv(listener, info, group, transfers, closing)
        return loop
    if group is not None:
        group.start()
        timeline.end("ranks")
    facts = {name: getattr(info, name) for name in ("model", "role", "device", "backend", "context_len", "kv_tokens")}
    if group is not None:
        facts["layout"] = layout.name
    facts["kv_bytes"] = sum((group.pool.n_total + 1) * group.layout.block_bytes for group in cache.groups)
    return Engine(loop, info, facts, transfers, stored)


def _load_drafters(model: Any, checkpoint: Checkpoint, device: str, args: argparse.Namespace) -> _Loaded:
    """Open what drafts for a model: unless a flag asks for it, nothing where only prompts are computed."""
    drafting, layout = open_drafting(model, checkpoint, args), model.shard.layout
    only_prompts = model.backend == "triton" and args.role == "prefill" and not args.join  # its role may change there
    if args.speculation == AUTO and only_prompts:
        _log.info("no drafts: this worker computes prompts only")
    setting = OFF if args.speculation == AUTO and only_prompts else args.speculation
    speculation = open_speculator(setting, device, head=drafting.drafter, n_ranks=layout.n_ranks)
    return _Loaded(model, checkpoint.fingerprint, device, layout, drafting, speculation)


def _load_tower(model: Any, device: str, args: argparse.Namespace) -> "Images | None":
    """Load the vision tower of a checkpoint. Returns None if it has none, or the engine takes no images."""
    if (config := read_tower_config(args.model)) is None:
        return None
    from emberline.models.registry import IMAGES_NEED, require_torch

    try:
        require_torch(IMAGES_NEED)
    except BadInput as error:
        _log.warning("%s; this worker takes no images", error)
        return None

    from emberline.engine.images.tower_loading import open_images

    return open_images(config, args, model, device)


def _size_cache(
    loaded: _Loaded, args: argparse.Namespace, group: "RankGroup | None", address: str, kv_bytes: int
) -> tuple[list[int], KVCache, Limits]:
    """Divide memory among the KV groups, and agree with the other ranks. address: where a follower receives KV."""
    n_blocks = list(split_bytes(loaded.kv_groups, kv_bytes, args.token_budget, args.max_running))
    if group is not None:
        n_blocks = group.agree(loaded.kv_groups, n_blocks, *((args.token, args.pem) if group.rank == 0 else (address,)))
    cache = KVCache(loaded.kv_groups, n_blocks, chunk=args.token_budget)
    return n_blocks, cache, _limits(loaded.model.config, cache, args)


def _open_cpu(loaded: _Loaded, args: argparse.Namespace, size: Sizing, _: CompileServer | None) -> _Opened:
    """Open the runner of a CPU, or of a GPU without Triton, whose pools only the runner itself can use."""
    model, device, prefill = loaded.model, loaded.device, BatchTimeLimit()
    n_blocks, cache, limits = size((args.kv_bytes or default_kv_bytes(device)) // loaded.layout.n_ranks)
    cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, cpu_shares.thread_setter(model.backend))
    shared, head = args.role != "both", loaded.drafting.head
    images = None if loaded.images is None else loaded.images.rows
    runner: CpuRunner
    if model.backend == "native" and head is None and images is None and loaded.layout.n_ranks == 1:
        runner = CpuRunner(model, n_blocks, limits, prefill, shared, cpu_share)
    else:  # draft heads, towers, and the stages of a pipeline, compute with tensors
        from emberline.engine.runners.cpu.torch_runner import TorchRunner

        runner = TorchRunner(model, n_blocks, limits, device, prefill, shared, cpu_share, head, images)
    if runner.memory is None:
        return _Opened(runner, cache, limits, prefill)
    mooncake = process.mooncake_engine(host_pools(runner.memory), args)
    transfers = host_transfers(loaded.fingerprint, loaded.kv_groups, runner.memory, mooncake)
    return _Opened(runner, cache, limits, prefill, transfers, HostMover(runner.memory))


def _open_gpu(loaded: _Loaded, args: argparse.Namespace, size: Sizing, compiler: CompileServer | None) -> _Opened:
    """Open the runner of a GPU, whose kernels `compiler` compiles."""
    from emberline.engine.runners.gpu.draft_model_chain import pool_blocks
    from emberline.engine.runners.gpu.engine import GpuEngine
    from emberline.engine.runners.gpu.preparation import StepPreparation
    from emberline.engine.runners.gpu.tiers import CudaMover, PinnedAllocator
    from emberline.engine.runners.gpu.transfer import device_pools, device_transfers, exported_pools

    model, fingerprint, device, _, (head, *_), speculation, images = loaded
    limits, speculates = _limits(model.config, None, args), speculation is not None
    rows = None if images is None else images.rows
    engine = GpuEngine.open(model, limits, device, args.kv_bytes, args.memory_share, speculates, head, rows)
    n_blocks, cache, limits = size(engine.memory.kv)
    sizes = pool_blocks(n_blocks, limits.max_running, head)
    exports = args.role != "both" or args.join  # in a cluster, its role may change
    pools, spans = exported_pools(loaded.kv_groups, sizes, device) if exports else (None, [])
    runner = engine.runner(n_blocks, limits, pools=pools)
    timed = None if speculation is None else speculation.calibrate
    preparation = StepPreparation(model, runner, limits, compiler, timed)
    mooncake = None
    if args.mooncake and spans:
        if problem := why_not_device_memory(args.mooncake, process.own_host(args), device):
            _log.warning("Mooncake does not move this GPU's memory: %s; KV passes through pinned host memory", problem)
        else:
            mooncake = process.mooncake_engine(device_pools(runner.pools, loaded.kv_groups), args)
            _log.info("Mooncake moves KV from and to this GPU's memory", extra={"protocol": args.mooncake})
    transfers = device_transfers(fingerprint, loaded.kv_groups, runner.pools, spans, mooncake)
    mover, allocate = CudaMover(runner.pools, loaded.kv_groups), PinnedAllocator(device)
    steps = engine.steps_in_flight
    return _Opened(runner, cache, limits, engine.prefill, transfers, mover, allocate, steps, preparation)


OPENERS = {"triton": _open_gpu}  # by backend; all others compute as a CPU does


def _build_loop(
    loaded: _Loaded, opened: _Opened, args: argparse.Namespace, group: "RankGroup | None"
) -> tuple["StepLoop | FollowerLoop", StoredCache | None]:
    """Build tiers, transfers and features over a runner, and the loop of this rank."""
    if group is not None:  # its transports are torch's
        from emberline.engine.ranks.opening import follow_kv, follower_loop, lead_kv, leader_runner
        from emberline.engine.ranks.rank_group import Member

    fingerprint, layout, kv_groups = loaded.fingerprint, loaded.layout, loaded.kv_groups
    slices = () if group is None else group.slices
    own_tiers = None
    if opened.mover is not None:
        own_tiers = open_tiers(args, fingerprint, kv_groups, opened.mover, opened.allocate, slices)
    idle_task = None
    if opened.preparation is not None:
        idle_task = _in_turn(opened.preparation.next, *(() if own_tiers is None else (own_tiers.allocate_more,)))
    if group is not None and isinstance(group, Member):
        executors = follow_kv(group, opened.transfers, own_tiers)
        drafts = loaded.drafting.here
        return follower_loop(group, opened.runner, executors, opened.steps_in_flight, idle_task, drafts=drafts), None
    transfers = None if opened.transfers is None else GroupTransfers(opened.transfers, slices)
    tiers = None if own_tiers is None else GroupTiers(own_tiers)
    if group is not None and transfers is not None:
        lead_kv(group, transfers, tiers)
    cache, limits, grammars = opened.cache, opened.limits, MatcherCompiler(opened.limits.vocab_size)
    scheduler = build_scheduler(
        cache, limits, fingerprint, grammars, opened.prefill, transfers, loaded.speculation, tiers, layout.pp,
        images=None if loaded.images is None else loaded.images.feature,
    )  # fmt: skip
    runner: Runner = opened.runner
    if group is not None:
        everywhere = idle_task is not None or loaded.drafting.head is not None
        runner = leading = leader_runner(group, runner, samples_everywhere=everywhere)
        idle_task = None if idle_task is None else leading.idle_task(idle_task)
    publish = None if group is None else group.publish_plan
    loop = StepLoop(scheduler, runner, max(opened.steps_in_flight, layout.pp), idle_task, publish)
    return loop, stored_cache(args, fingerprint, tiers)


def _in_turn(*tasks: Callable[[], bool]) -> Callable[[], bool]:
    """Make one task of several: each call does a part of the first that is not done."""
    left = deque(tasks)

    def part() -> bool:
        if left and not left[0]():
            left.popleft()
        return bool(left)

    return part


def build_scheduler(
    cache: KVCache,
    limits: Limits,
    fingerprint: str,
    grammars: Guides | None = None,
    prefill: PrefillPolicy | None = None,
    transfers: GroupTransfers | None = None,
    speculation: Speculation | None = None,
    tiers: GroupTiers | None = None,
    micro_batches: int = 1,
    guide_threads: GuideThreads | None = None,
    images: PromptImages | None = None,
) -> Scheduler:
    """Build a scheduler with the features that are given. Without `grammars`, the grammars of requests are ignored."""
    prefill = prefill or PrefillPolicy()
    features: list[Feature] = []
    if transfers is not None:
        features.append(Handover(transfers, fingerprint))
    if grammars is not None:
        appends = speculation is not None and prefill.drafts_beside_prompts
        appended = None if speculation is None else speculation.appended
        guided = GuidedDecoding(grammars, speculation is not None, appends, appended, guide_threads)
        if isinstance(speculation, Speculator):
            speculation.follow_grammars(guided)
        features.append(guided)
    features += [
        AllowedTokens(limits.vocab_size),
        PromptScoring(composition.why_not("prompt_logprobs", "pp") if micro_batches > 1 else None),
        images or PromptImages(),
    ]
    if tiers is not None:
        features.append(Tiering(tiers))
    if speculation is not None:
        features.append(speculation)
    return Scheduler(cache, limits, fingerprint, features, prefill, micro_batches)


def _listen(args: argparse.Namespace, closing: ExitStack) -> tuple[socket.socket, str]:
    """Listen where a follower receives KV: next to rank 0's socket, on another port of its host, or where it was told.
    Raises BadInput if that is not possible."""
    address = args.socket
    if not address.startswith("tcp:"):
        address = f"{address}.rank{args.rank}"
    elif args.by_rank_0:
        address = f"{address.rpartition(':')[0]}:0"
    try:
        return closing.enter_context(listening(address))
    except OSError as error:
        raise BadInput(f"this rank cannot receive KV at {address}: {error}") from None


def _receive_kv(
    listener: socket.socket, info: EngineInfo, group: Any, transfers: TransferManager, closing: ExitStack
) -> None:
    """Let other engines send KV to a follower, which sends its own as the same worker: rank 0 has told it how."""
    secure = None
    if group.pem:
        secure, transfers.tls = server_context(group.pem), client_context(group.pem)
    closing.callback(serve_senders(listener, info, group.token, transfers.accept, tls=secure))


def _expects_cuda(args: argparse.Namespace) -> bool:
    """True if the device will be a GPU, as far as that is known before torch is imported."""
    return args.device != "cpu" and Path("/dev/nvidiactl").exists()


def _read_ahead(args: argparse.Namespace) -> ReadAhead | None:
    """Begin to read the checkpoint for a GPU, which needs all of it, before torch is imported."""
    if not _expects_cuda(args) or args.random_weights is not None:
        return None
    return ReadAhead(model_files(args.model), free_host_bytes() // 2)


def _verify_weights(args: argparse.Namespace) -> None:
    """Compare a compressed checkpoint with the SHA-256 of its source, if that was asked for. Raises BadCheckpoint."""
    if args.verify_weights and args.random_weights is None and not args.rank and is_compressed(args.model):
        verify_folder(args.model)
        _log.info("the weights are those that were compressed, by SHA-256")


def _set_defaults(args: argparse.Namespace, device: str) -> None:
    for name, value in (CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.max_running > args.token_budget:
        raise BadInput("--token-budget must be at least --max-running: each sequence takes one token per step")


def _explain_out_of_memory(
    error: RuntimeError, checkpoint: Checkpoint, device: str, args: argparse.Namespace, compress: bool
) -> None:
    """Raise BadInput that says by how much a model is too large for the GPU, if its memory has run out."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return
    from emberline.engine.runners.gpu.engine import check_fits
    from emberline.models.registry import lay_out

    limits = _limits(checkpoint.config, None, args)
    check_fits(lay_out(checkpoint, compress=compress), limits, device, args.kv_bytes, args.memory_share)


def _limits(config: ModelConfig, cache: KVCache | None, args: argparse.Namespace) -> Limits:
    """Limits of a model with a KV cache; None: before the cache is sized, which may bound the context."""
    context_len = min(config.context_len, args.context_len or config.context_len)
    capacity = context_len if cache is None else cache.capacity
    if capacity < context_len:
        _log.warning("the KV cache holds %d of %d tokens that a sequence may have", capacity, context_len)
    return Limits(
        context_len=min(context_len, capacity),
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        max_running=args.max_running,
        token_budget=args.token_budget,
    )
