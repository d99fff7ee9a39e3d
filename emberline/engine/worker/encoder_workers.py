"""Construction of workers that generate no text: encoders, and models of speech."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline.engine.encoders.speech import Transcriber
from emberline.engine.encoders.speech_loop import SpeechLoop
from emberline.engine.worker import cpu_share as cpu_shares
from emberline.engine.worker import process
from emberline.protocol.frames import EngineInfo
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.task_config import TaskConfig
from emberline.weights.whisper_files import CONTEXT_LEN, read_whisper

if TYPE_CHECKING:
    from emberline.engine.encoders.encoder_loop import EncoderLoop

ENCODER_TOKENS, GPU_ENCODER_TOKENS = 1024, 16_384  # of a step: more makes others wait longer and computes no faster
ENCODER_RUNNING = 256  # requests
SPEECH_RUNNING = 4  # requests, which take turns: more would only hold more decoded audio

# The loop that serves the model, what clients are told of it, and facts for the log and the ready line.
Opened = tuple["EncoderLoop | SpeechLoop", EngineInfo, dict[str, Any]]


def open_encoder(args: argparse.Namespace, task: TaskConfig) -> Opened:
    """Load a model that embeds, ranks or classifies texts."""
    with process.without_collections():
        from emberline.models.registry import ENCODERS_NEED, load_encoder, require_torch, select_device

        require_torch(ENCODERS_NEED)

        from emberline.engine.encoders.encoder_loop import EncoderLimits, EncoderLoop

    device = select_device(args.device)
    checkpoint = open_checkpoint(args.model)
    model = load_encoder(checkpoint, device, args.threads)
    cpu_shares.set_threads(model.backend, args.threads)
    config = checkpoint.config
    limits = EncoderLimits(
        vocab_size=config.vocab_size,
        max_len=min(config.context_len, task.max_len or config.context_len),
        token_budget=args.token_budget or (ENCODER_TOKENS if device == "cpu" else GPU_ENCODER_TOKENS),
    )
    cpu_share = cpu_shares.open_share(args.cpu_share, args.threads, cpu_shares.thread_setter(model.backend))
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
    facts = {name: getattr(info, name) for name in ("model", "task", "device", "backend", "context_len")}
    return loop, info, facts


def open_speech(args: argparse.Namespace) -> Opened:
    """Load a model that transcribes speech."""
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
