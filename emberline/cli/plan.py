"""`emberline plan`: what a model takes of a GPU, what is left for its KV cache, and how fast it will run."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from emberline.catalog.model_store import ModelStore, looks_like_path
from emberline.catalog.published_shapes import find_shape
from emberline.cli import common
from emberline.engine.gpu.hardware import parse_gpus
from emberline.engine.scheduler.limits import Limits
from emberline.protocol.errors import BadInput
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.task_config import read_json

if TYPE_CHECKING:
    from emberline.engine.gpu.capacity_plan import CapacityPlan
    from emberline.models.decoder import Decoder
    from emberline.weights.checkpoint import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a model that is pulled or known by its shape, a GGUF file, or a folder with config.json",
    )
    add("--gpus", default="1xH200", metavar="NxGPU", help="how many of which (default 1xH200)")
    add("--hardware", type=Path, metavar="FILE", help="TOML with further GPUs, as tables [[gpu]]")
    add(
        "--context", type=int, default=4096, metavar="N", help="tokens of each sequence in a decode step (default 4096)"
    )
    for flag, key, text in (
        ("--kv-bytes", "engine.kv_bytes", "KV cache, e.g. 40G (default: what is left)"),
        ("--max-running", "engine.max_running", "sequences in a batch"),
        ("--token-budget", "engine.token_budget", "tokens computed per step"),
        ("--gpu-memory-share", "engine.gpu_memory_share", "of the GPU's memory, e.g. 0.5 (default: all of it)"),
    ):
        add(flag, dest=key, metavar="N", help=text)
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    count, gpu = parse_gpus(args.gpus, args.hardware)
    if args.context < 1:
        raise BadInput("--context is at least 1", param="context")
    try:
        checkpoint = _checkpoint(args.model, ModelStore(config.home))
        model = _lay_out(checkpoint)
    except BadCheckpoint as error:
        raise BadInput(f"{args.model} cannot be served: {error}", param="model") from None

    from emberline.engine.gpu.capacity_plan import plan_capacity
    from emberline.engine.worker import GPU_DEFAULTS

    limits = Limits(
        context_len=checkpoint.config.context_len,
        vocab_size=checkpoint.config.vocab_size,
        eos_ids=checkpoint.config.eos_ids,
        max_running=config.engine.max_running or GPU_DEFAULTS["max_running"],
        token_budget=config.engine.token_budget or GPU_DEFAULTS["token_budget"],
    )
    share, *others = config.engine.gpu_memory_share or (1.0,)
    if others:
        raise BadInput("a plan is of one model: give its --gpu-memory-share alone", param="gpu_memory_share")
    plan = plan_capacity(model, gpu, limits, config.engine.kv_bytes or None, args.context, share)
    if args.json:
        common.print_json({"model": args.model, "gpus": count, **msgspec.to_builtins(plan)})
    else:
        _print(args.model, count, plan)
    return 0


def _checkpoint(name: str, store: ModelStore) -> "Checkpoint":
    shape = find_shape(name) if not looks_like_path(name) and store.find(name) is None else None
    if shape is not None:
        return generate_checkpoint(shape.config, 0)
    path = Path(name).expanduser() if looks_like_path(name) else store.resolve(name).path
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return generate_checkpoint(read_json(path, "config.json"), 0)
    return open_checkpoint(path)


def _lay_out(checkpoint: "Checkpoint") -> "Decoder":
    from emberline.models.registry import lay_out

    if isinstance(checkpoint.config, EncoderConfig):
        raise BadInput("plans are for models that generate text; one that embeds or classifies has no KV cache")
    try:
        return lay_out(checkpoint)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise BadInput("a plan needs Triton, whose kernels decide what a step takes: pip install triton") from None


def _print(name: str, count: int, plan: "CapacityPlan") -> None:
    rows = [
        ("weights", plan.weights_bytes, ""),
        ("KV cache", plan.kv_bytes, f"{plan.kv_tokens:,} tokens of {common.format_size(plan.kv_bytes_per_token)}"),
        ("workspace", plan.workspace_bytes, "activations of a step"),
        ("state", plan.state_bytes, "block tables, sampler"),
        ("reserve", plan.reserve_bytes, "CUDA graphs, libraries"),
        ("CUDA context", plan.context_bytes, ""),
    ]
    print(f"{name} on {plan.gpu}, {common.format_size(plan.memory_bytes)}" + _replicas(count) + "\n")
    common.print_table([(title, f"{common.format_size(size):>10}", note) for title, size, note in rows])
    print(f"\nContext: up to {plan.context_len:,} tokens of one sequence.")
    print(f"Expected, by roofline and at {plan.decode_context:,} tokens each:\n")
    common.print_table(
        [
            ("sequences", "step", "tokens/s"),
            *((n, f"{ms:.2f} ms", f"{1e3 * int(n) / ms:,.0f}") for n, ms in plan.decode_step_ms.items()),
        ]
    )
    print(f"\nA prompt of 8,192 tokens: {plan.prefill_8192_s:.3f} s.")


def _replicas(count: int) -> str:
    return f"; {count} replicas, one on each of {count} GPUs" if count > 1 else ""
