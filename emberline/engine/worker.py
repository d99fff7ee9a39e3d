"""The engine process: `python -m emberline.engine.worker --model PATH --socket ADDRESS`."""

import argparse
import gc
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline import log
from emberline.engine import cpu_share as cpu_shares
from emberline.engine import process
from emberline.engine.encoder_loop import EncoderLimits, EncoderLoop
from emberline.engine.grammar.compiler import MatcherCompiler
from emberline.engine.memory import default_kv_bytes, free_host_bytes
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.prefill_policy import BatchTimeLimit
from emberline.engine.scheduler.scheduler import Scheduler
from emberline.engine.socket_server import Server
from emberline.engine.speech import Transcriber
from emberline.engine.speech_loop import SpeechLoop
from emberline.engine.step_loop import StepLoop
from emberline.kernels.cpu.build import private_cache_dir
from emberline.kernels.gpu.compile_server import CompileServer, hash_compiler, start_server
from emberline.kv.block_pool import split_bytes
from emberline.kv.cache import KVCache
from emberline.kv.transfer.manager import host_transfers
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import EngineInfo
from emberline.weights.checkpoint import Checkpoint, open_checkpoint
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import ModelConfig
from emberline.weights.readahead import ReadAhead, model_files
from emberline.weights.task_config import TaskConfig, read_json, task_of
from emberline.weights.whisper_files import CONTEXT_LEN, read_whisper

if TYPE_CHECKING:
    from emberline.engine.gpu.preparation import StepPreparation

CPU_DEFAULTS = {"max_running": 64, "token_budget": 512}
GPU_STEPS_IN_FLIGHT = 2  # one is computed while the next is planned
ENCODER_TOKENS, GPU_ENCODER_TOKENS = 1024, 16_384  # of a step: more makes others wait longer and computes no faster
ENCODER_RUNNING = 256  # requests
SPEECH_RUNNING = 4  # they take turns: more would only hold more decoded audio
GPU_DEFAULTS = {"max_running": 256, "token_budget": 8192}

_log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    log.setup("engine")
    parent = process.Parent()  # before the model is loaded, which takes seconds
    began_s = time.monotonic()
    try:
        token = process.join_token(args.socket)
        loop, info, facts = build(args)
        gc.freeze()  # permanent objects: collections between steps need not scan them
        with process.listening(args.socket) as (listener, address):
            server = Server(listener, loop, info, token)
            facts |= {"id": args.id, "address": address, "load_s": round(time.monotonic() - began_s, 3)}
            _log.info("serving %s", info.model, extra=facts)
            process.serve(server, parent, facts)
    except Exception as error:
        return process.fail(error)
    return 0


def build(args: argparse.Namespace) -> tuple[StepLoop | EncoderLoop | SpeechLoop, EngineInfo, dict[str, Any]]:
    """Load the model and build its step loop. The facts are for the log and the ready line."""
    if args.device not in ("auto", "cpu") and not args.device.startswith("cuda"):
        raise BadInput(f"--device is auto, cpu or cuda, not {args.device}")
    task = task_of(args.model)
    if task.task == "transcribe":
        return _build_speech(args)
    if task.task != "generate":
        return _build_encoder(args, task)
    ahead = _read_ahead(args)
    checkpoint = _open_checkpoint(args)
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(private_cache_dir() / "triton")
    compile_server = None
    if _expects_cuda(args):
        compile_server = start_server()
        hash_compiler()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

    import torch  # takes a second or more: not before a start that fails

    from emberline.models.registry import begin_loading, select_device

    device = select_device(args.device)
    _set_defaults(args, device)
    if device.startswith("cuda") and not args.deterministic:
        from emberline.engine.gpu.engine import load_attention

        load_attention(device)
    fingerprint = checkpoint.fingerprint
    with ExitStack() as reading:
        try:
            model, weights = begin_loading(checkpoint, device, args.deterministic, args.threads, ahead)
            if weights is not None:
                reading.enter_context(weights)
            if model.backend == "native":
                torch.set_num_threads(1)  # the kernels have their own threads; torch's would compete for the cores
            elif args.threads is not None:
                torch.set_num_threads(args.threads)
            loop, cache, limits, preparation = _step_loop(model, fingerprint, device, args, compile_server)
        except torch.OutOfMemoryError:
            _check_fits(checkpoint, device, args)
            raise
        if preparation is not None:
            preparation.first()
        if weights is not None:
            weights.finish()
        if preparation is not None:
            preparation.finish_essential()
    checkpoint.close()

    info = EngineInfo(
        model=args.name or args.model.stem,
        fingerprint=fingerprint,
        context_len=limits.context_len,
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_ids,
        kv_groups=model.kv_groups,
        kv_tokens=cache.n_tokens,
        device=device,
        backend=model.backend,
        max_running=limits.max_running,
        role=args.role,
        transfers=process.receive_transports(loop.transfers, args),
    )
    facts = {name: getattr(info, name) for name in ("model", "role", "device", "backend", "context_len", "kv_tokens")}
    if ahead is not None:
        ahead.release()
    facts["kv_bytes"] = sum((group.pool.n_total + 1) * group.layout.block_bytes for group in cache.groups)
    return loop, info, facts


def _build_encoder(args: argparse.Namespace, task: TaskConfig) -> tuple[EncoderLoop, EngineInfo, dict[str, Any]]:
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
) -> tuple[StepLoop, KVCache, Limits, "StepPreparation | None"]:
    from emberline.engine.torch_runner import TorchRunner

    def caches(kv_bytes: int) -> tuple[list[int], KVCache, Limits]:
        n_blocks = split_bytes(model.kv_groups, kv_bytes, args.token_budget, args.max_running)
        cache = KVCache(model.kv_groups, n_blocks, chunk=args.token_budget)
        return n_blocks, cache, _limits(model.config, cache, args)

    if model.backend != "triton":
        n_blocks, cache, limits = caches(args.kv_bytes or default_kv_bytes(device))
        prefill = BatchTimeLimit()
        cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, _thread_setter(model.backend))
        runner = TorchRunner(model, n_blocks, limits, device, prefill, args.role == "decode", cpu_share)
        transfers = None
        if runner.memory is not None:
            mooncake = process.mooncake_engine(runner.memory, args)
            transfers = host_transfers(fingerprint, model.kv_groups, runner.memory, mooncake)
        scheduler = Scheduler(cache, limits, fingerprint, MatcherCompiler(limits.vocab_size), prefill, transfers)
        return StepLoop(scheduler, runner, transfers=transfers), cache, limits, None
    from emberline.engine.gpu.engine import GpuEngine
    from emberline.engine.gpu.preparation import StepPreparation
    from emberline.engine.gpu.transfer import device_transfers, exported_pools

    engine = GpuEngine.open(model, _limits(model.config, None, args), device, args.kv_bytes, args.memory_share)
    n_blocks, cache, limits = caches(engine.memory.kv)
    pools, spans = exported_pools(model.kv_groups, n_blocks, device) if args.role == "decode" else (None, [])
    gpu_runner = engine.runner(n_blocks, limits, pools=pools)
    transfers = device_transfers(fingerprint, model.kv_groups, gpu_runner.pools, spans)
    scheduler = Scheduler(cache, limits, fingerprint, MatcherCompiler(limits.vocab_size), engine.prefill, transfers)
    preparation = StepPreparation(model, gpu_runner, limits, compile_server)
    loop = StepLoop(scheduler, gpu_runner, GPU_STEPS_IN_FLIGHT, preparation.next, transfers)
    return loop, cache, limits, preparation


def _check_fits(checkpoint: Checkpoint, device: str, args: argparse.Namespace) -> None:
    """Raise BadInput that says by how much a model is too large for the GPU, whose memory has run out."""
    from emberline.engine.gpu.engine import check_fits
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


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = process.arguments("emberline.engine.worker", "Serve one model on one socket.")
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="a GGUF file or a checkpoint folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.set_defaults(max_running=None, token_budget=None)  # depend on the device
    parser.add_argument(
        "--kv-bytes", type=process.positive, metavar="N", help="size of the KV cache; default: from the free memory"
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
    parser.add_argument("--threads", type=process.positive, metavar="N", help="CPU threads; default: one per core")
    parser.add_argument(
        "--cpu-share", metavar="FILE:SLOT", help="use fewer threads while other workers compute; all have the same file"
    )
    parser.add_argument("--deterministic", action="store_true", help="the same tokens whatever else is in the batch")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
