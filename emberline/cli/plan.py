"""`emberline plan`: which layout of which GPUs holds a model, what room is left for KV, and how fast it will run."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from emberline.catalog.model_store import ModelStore, looks_like_path
from emberline.catalog.published_shapes import PublishedShape, find_shape
from emberline.cli import common
from emberline.engine import composition
from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import KERNEL_SHARED_KIB, Gpu, parse_gpus
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.encoder_checkpoint import EncoderConfig
from emberline.weights.image_settings import image_processor
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.outline import OutlineCheckpoint
from emberline.weights.task_config import read_json
from emberline.weights.vision_config import TowerConfig, read_tower_config, tower_config

if TYPE_CHECKING:
    from emberline.engine.planning.layout_plan import LayoutPlan, StagePlan, Workload
    from emberline.engine.planning.layout_search import Comparison
    from emberline.models.decoder import Decoder
    from emberline.models.draft_head import GpuDraftHead
    from emberline.models.draft_model import DraftModel
    from emberline.weights.checkpoint import Checkpoint

MOST_LAYOUTS = 12  # that are shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        help="a model that is pulled or known by its shape, a GGUF file, or a folder with config.json",
    )
    add("--gpus", default="1xH200", metavar="NxGPU", help="how many of which (default 1xH200)")
    add("--hardware", type=Path, metavar="FILE", help="TOML with further GPUs, as tables [[gpu]]")
    add("--layout", metavar="tp=N,pp=N,…", help="of each replica: tp, pp, dcp, ep (default: all are compared)")
    add("--input-tokens", type=int, default=4096, metavar="N", help="of a prompt (default 4096)")
    add("--output-tokens", type=int, default=512, metavar="N", help="of a reply (default 512)")
    add("--concurrency", type=int, default=32, metavar="N", help="sequences at once, on all GPUs (default 32)")
    add("--prefill-decode", metavar="P:D", help="replicas that only prefill and only decode (default: all do both)")
    add("--drive", type=float, default=3.0, metavar="GB/S", help="rate at which weights are read (default 3.0)")
    add(
        "--context", type=int, default=4096, metavar="N", help="tokens of each sequence in a decode step (default 4096)"
    )
    for flag, key, text in (
        ("--kv-bytes", "engine.kv_bytes", "KV cache of a GPU, e.g. 40G (default: what is left)"),
        ("--max-running", "engine.max_running", "sequences in a batch"),
        ("--token-budget", "engine.token_budget", "tokens computed per step"),
        ("--gpu-memory-share", "engine.gpu_memory_share", "of a GPU's memory, e.g. 0.5 (default: all of it)"),
    ):
        add(flag, dest=key, metavar="N", help=text)
    add("--weights", dest="engine.weights", metavar="FORM", help="BF16 weights: plain (default), compressed or auto")
    add("--draft-model", metavar="MODEL", help="a smaller model that drafts for it, with the same tokenizer")
    add("--draft-head", type=Path, metavar="FOLDER", help="an EAGLE-3 head that drafts for it")
    common.add_data_dir(parser)
    common.add_json(parser)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    count, gpu = parse_gpus(args.gpus, args.hardware)
    for name in ("context", "input_tokens", "output_tokens", "concurrency"):
        if getattr(args, name) < 1:
            raise BadInput(f"--{name.replace('_', '-')} is at least 1", param=name)
    if args.drive <= 0:
        raise BadInput("--drive is a rate above 0, in GB/s", param="drive")
    layouts = None if args.layout is None else [parse_layout(args.layout)]
    split = None if args.prefill_decode is None else _parse_split(args.prefill_decode)
    share, *others = config.engine.gpu_memory_share or (1.0,)
    if others:
        raise BadInput("a plan is of one model: give its --gpu-memory-share alone", param="gpu_memory_share")
    store = ModelStore(config.home)
    try:
        checkpoint = _checkpoint(args.model, store)
    except BadCheckpoint as error:
        raise BadInput(f"{args.model} cannot be served: {error}", param="model") from None
    if isinstance(checkpoint.config, EncoderConfig):
        raise BadInput("plans are for models that generate text; one that embeds or classifies has no KV cache")
    from emberline.kernels.gpu.triton_placeholder import importable_kernels
    from emberline.models.registry import require_torch

    require_torch("`emberline plan` needs")

    with importable_kernels():
        import emberline.kernels.gpu.backend.triton_backend  # noqa: F401
        from emberline.engine.planning.layout_plan import Planner, Workload
        from emberline.engine.planning.layout_search import compare
        from emberline.engine.worker.build import GPU_DEFAULTS

    limits = Limits(
        context_len=checkpoint.config.context_len,
        vocab_size=checkpoint.config.vocab_size,
        eos_ids=checkpoint.config.eos_ids,
        max_running=config.engine.max_running or GPU_DEFAULTS["max_running"],
        token_budget=config.engine.token_budget or GPU_DEFAULTS["token_budget"],
    )
    workload = Workload(
        input_tokens=args.input_tokens, output_tokens=args.output_tokens, concurrency=args.concurrency, split=split
    )
    asked = {name for name, value in (("draft_model", args.draft_model), ("eagle3", args.draft_head)) if value}
    composition.check(asked)
    try:
        drafting = _drafting(args, checkpoint, store)
    except BadCheckpoint as error:
        flag, name = ("draft-model", args.draft_model) if args.draft_model else ("draft-head", args.draft_head)
        raise BadInput(
            f"--{flag} {name} cannot draft for {args.model}: {error}", param=flag.replace("-", "_")
        ) from None
    try:
        planner = Planner(
            checkpoint, gpu, limits, config.engine.kv_bytes or None, share, args.drive, drafting, asked,
            _tower(args.model, store), config.engine.weights,
        )  # fmt: skip
        found = compare(planner, count, workload, layouts, args.context)
    except BadCheckpoint as error:
        raise BadInput(f"{args.model} cannot be served: {error}", param="model") from None
    if args.json:
        common.print_json(_document(args.model, count, gpu, workload, found))
    else:
        _print(args.model, count, gpu, workload, found)
    return 0


def parse_layout(text: str) -> Layout:
    """`tp=4,pp=2,ep`: what `--tp 4 --pp 2 --ep` asks of a server."""
    values: dict[str, int | bool] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(tp|pp|dcp|ep)\s*(?:=\s*(\d{1,4}))?\s*", part)
        if match is None or (match[1] != "ep" and match[2] is None) or match[1] in values:
            raise BadInput(
                f"--layout {text!r}: give tp=N, pp=N, dcp=N and ep, each once, as in tp=8,dcp=8", param="layout"
            )
        values[match[1]] = match[2] != "0" if match[1] == "ep" else int(match[2])
    return msgspec.convert(values, Layout)


def _parse_split(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text)
    if match is None or not int(match[1]) or not int(match[2]):
        raise BadInput(f"--prefill-decode {text!r}: give two numbers of replicas, as in 1:3", param="prefill_decode")
    return int(match[1]), int(match[2])


def _located(name: str, store: ModelStore) -> PublishedShape | Path:
    """The published shape of a name, or the path of a model that is here."""
    shape = find_shape(name, store.shapes) if not looks_like_path(name) and store.find(name) is None else None
    return shape or (Path(name).expanduser() if looks_like_path(name) else store.resolve(name).path)


def _tower(name: str, store: ModelStore) -> TowerConfig | None:
    """Configuration of the model's vision tower. Returns None if it has none."""
    found = _located(name, store)
    if isinstance(found, Path):
        return read_tower_config(found)
    processor = image_processor(found.config)
    return None if processor is None else tower_config(found.config, processor)


def _checkpoint(name: str, store: ModelStore) -> "Checkpoint | OutlineCheckpoint":
    path = _located(name, store)
    if isinstance(path, PublishedShape):
        return OutlineCheckpoint(path.config)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return OutlineCheckpoint(read_json(path, "config.json"))
    return open_checkpoint(path)


def _drafting(
    args: argparse.Namespace, checkpoint: "Checkpoint | OutlineCheckpoint", store: ModelStore
) -> "Callable[[Decoder], GpuDraftHead | DraftModel] | None":
    """Return the constructor of the model's drafter, if it has one, without memory."""
    if args.draft_model is not None:
        from emberline.models.draft_model import DraftModel
        from emberline.models.registry import lay_out

        draft = _checkpoint(args.draft_model, store)
        if isinstance(draft.config, EncoderConfig):
            raise BadInput(f"--draft-model {args.draft_model} does not write text", param="draft_model")
        decoder = lay_out(draft)
        return lambda model: DraftModel(decoder, "", model.config.n_layers, model.config.vocab_size)
    if args.draft_head is not None:
        import torch

        from emberline.models.draft_head import GpuDraftHead
        from emberline.models.eagle3 import Eagle3Head
        from emberline.models.eagle3_files import read_config

        shape = read_config(args.draft_head, checkpoint.config.n_layers)
        shape.check(checkpoint.config, shape.target)  # of a model without weights the fingerprint is not known
        with torch.device("meta"):
            head = Eagle3Head(shape)
        return lambda model: GpuDraftHead(head, model)
    return None


# --- output -----------------------------------------------------------------------------------------------------------


def _document(name: str, count: int, gpu: Gpu, workload: "Workload", found: "Comparison") -> object:
    best, *others = found.plans
    return {
        "model": name,
        "gpus": count,
        "gpu": msgspec.to_builtins(gpu),
        "runs_here": gpu.runs_kernels,
        "workload": msgspec.to_builtins(workload),
        "recommended": msgspec.to_builtins(best),
        "others": msgspec.to_builtins(others),
        "refused": [
            {"layout": msgspec.to_builtins(each.layout), "reason": each.reason, "missing_bytes": each.missing}
            for each in found.refused
        ],
    }


def _print(name: str, count: int, gpu: Gpu, workload: "Workload", found: "Comparison") -> None:
    best = found.plans[0]
    print(f"{name} on {count} × {gpu.name}, {common.format_size(best.memory_bytes)}" + " each" * (count > 1))
    print(
        f"{workload.concurrency} sequences at once, {workload.input_tokens:,} tokens in,"
        f" {workload.output_tokens:,} out"
        + (" (prefill:decode {}:{})".format(*workload.split) if workload.split else "")
    )
    if not gpu.runs_kernels:
        print(
            f"\nArithmetic only: the GPU kernels need {KERNEL_SHARED_KIB} KiB of shared memory a block,"
            f"\nand {gpu.name} has {gpu.shared_kib}. `emberline serve` uses the CPU there."
        )
    if count > 1:
        print()
        _print_layouts(found)
        compared = len(found.plans) + len(found.refused) > 1
        print(f"\n{'Recommended' if compared else 'Options of serve'}: {_flags(best, workload)}")
    print()
    _print_memory(best)
    _print_times(best, workload)


def _print_layouts(found: "Comparison") -> None:
    rows = [("layout", "weights", "KV room", "KV tokens", "TTFT", "ITL", "tokens/s")]
    for plan in found.plans[:MOST_LAYOUTS]:
        times = f"{plan.replicas} × " if plan.replicas > 1 else ""
        rows.append(
            (
                times + _name(plan.layout),
                common.format_size(plan.rank_weights_bytes),
                common.format_size(plan.kv_bytes * plan.replicas),
                f"{plan.kv_tokens * plan.replicas:,}",
                _seconds(plan.ttft_s),
                f"{plan.itl_ms:.1f} ms",
                f"{plan.tokens_s:,.0f}",
            )
        )
    _print_columns(rows)
    more = len(found.plans) - MOST_LAYOUTS
    if more > 0:
        print(f"{more} more {'is' if more == 1 else 'are'} slower (--json lists them all)")
    if found.refused:
        nearest = min(found.refused, key=lambda each: each.missing)
        lacks = f"{_name(nearest.layout)} lacks {common.format_size(nearest.missing)} a GPU"
        n = len(found.refused)
        print(f"{n} more do not fit; the nearest, {lacks}" if n > 1 else f"One more does not fit: {lacks}")


def _print_memory(plan: "LayoutPlan") -> None:
    several, stages = len(plan.stages) > 1, plan.stages
    fullest = max(stages, key=lambda stage: stage.weights_bytes + stage.tower_bytes)
    print("Memory of a GPU" + (f" of the fullest stage (layers {_layers(fullest)}):" if several else ":"))
    rows = [
        ("  weights", fullest.weights_bytes, _of_weights(plan, fullest)),
        ("  vision tower", fullest.tower_bytes, "divided like the layers" if plan.layout.tp > 1 else ""),
        (
            "  KV cache",
            fullest.kv_bytes,
            f"{plan.kv_tokens:,} tokens of {common.format_size(plan.kv_bytes_per_token)}"
            + (f", {drafts}" if (drafts := _of_drafter(fullest.draft_kv_bytes)) else ""),
        ),
        ("  workspace", fullest.workspace_bytes, "activations of a step"),
        ("  images", fullest.image_bytes, "rows that are kept, an encoding"),
        ("  state", fullest.state_bytes, "block tables, sampler"),
        ("  reserve", fullest.reserve_bytes, "CUDA graphs, libraries"),
        ("  collectives", fullest.collective_bytes, "NCCL, memory that other ranks map"),
        ("  CUDA context", fullest.context_bytes, ""),
    ]
    common.print_table([(title, f"{common.format_size(size):>10}", note) for title, size, note in rows if size])
    if several:
        sizes = ", ".join(f"{stage.layers[1] - stage.layers[0]}" for stage in stages)
        print(f"Stages of {sizes} layers; the slowest takes {plan.stage_imbalance:.3f} × the mean.")
    if plan.gpus > 1:
        print(f"KV of the {plan.gpus} GPUs of a replica: {common.format_size(plan.kv_bytes)}.")
    print(f"Context: up to {plan.context_len:,} tokens of one sequence.")


def _of_weights(plan: "LayoutPlan", stage: "StagePlan") -> str:
    notes = (
        "losslessly compressed (times follow from bytes alone)" if plan.compressed else "",
        _of_drafter(stage.draft_weights_bytes),
    )
    return ", ".join(filter(None, notes))


def _of_drafter(n_bytes: int) -> str:
    return f"{common.format_size(n_bytes)} of the drafter" if n_bytes else ""


def _layers(stage: "StagePlan") -> str:
    return f"{stage.layers[0]}–{stage.layers[1] - 1}"


def _print_times(plan: "LayoutPlan", workload: "Workload") -> None:
    print("\nExpected, by roofline with measured efficiencies:")
    talk = f", of which {plan.itl_collective_ms:.1f} ms between ranks" if plan.gpus > 1 else ""
    print(f"  TTFT {_seconds(plan.ttft_s)} for a prompt of {workload.input_tokens:,} tokens that waits for no other")
    print(f"  ITL {plan.itl_ms:.1f} ms with {plan.sequences} sequences a replica{talk}")
    wanted = -(-workload.concurrency // (workload.split[1] if workload.split else plan.replicas))
    if plan.sequences < wanted:
        print(f"  ({wanted} were asked for: the others wait)")
    print(f"  {plan.tokens_s:,.0f} tokens/s in all, {plan.tokens_s / workload.output_tokens:,.1f} requests/s")
    split = plan.split
    if workload.split is None:
        print(
            f"  Prefill:decode by rate matching: {split.ratio:.2f} prefill replicas for each that decodes"
            + (
                f",\n  here {split.prefill}:{split.decode} for {split.requests_s:,.1f} requests/s"
                if plan.replicas > 1
                else ""
            )
        )
    print(f"  Start from the drive: {common.format_duration(plan.start_s)}")
    print(f"\nDecode steps at {plan.decode_context:,} tokens each:")
    rows = [("  sequences", "step", "tokens/s")]
    rows += [(f"  {n}", f"{ms:.2f} ms", f"{1e3 * int(n) / ms:,.0f}") for n, ms in plan.decode_step_ms.items()]
    _print_columns(rows)


def _name(layout: Layout) -> str:
    return layout.name if layout.n_ranks > 1 else "one GPU"


def _flags(plan: "LayoutPlan", workload: "Workload") -> str:
    layout = plan.layout
    flags = [f"--{key} {n}" for key in ("tp", "pp", "dcp") if (n := getattr(layout, key)) > 1]
    flags += ["--ep"] if layout.ep else []
    if workload.split is not None:
        flags.append("--prefill-workers {} --decode-workers {}".format(*workload.split))
    elif plan.replicas > 1:
        flags.append(f"--replicas {plan.replicas}")
    flags += ["--weights compressed"] if plan.compressed else []
    return " ".join(flags)


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    """The first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        print("  ".join([first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True))]))
