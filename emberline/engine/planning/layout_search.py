"""Compares the layouts that a model can have on a number of GPUs, for a workload, and chooses one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import GPUS, Gpu
from emberline.engine.planning.layout_plan import DoesNotFit, LayoutPlan, Planner, Workload
from emberline.models.shard import check_layout
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import MAX_RANKS, Layout, divisors, nearest_divisors
from emberline.weights.model_config import BadCheckpoint, ModelConfig
from emberline.weights.outline import TensorSource
from emberline.weights.vision_config import TowerConfig

SMALL = 2 << 30  # bytes that steps of fewer tokens or sequences may save
QUANTIZED = {"FP8": 0.52, "INT4": 0.29}  # bytes of a quantized checkpoint over those of a bf16 one


@dataclass(frozen=True, slots=True)
class Refusal:
    layout: Layout
    reason: str
    missing: int  # bytes of a GPU


@dataclass(slots=True)
class Comparison:
    """Plans, the best first, and the layouts that do not hold the model or the workload."""

    plans: list[LayoutPlan] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


def recommend(
    source: TensorSource,
    gpu: Gpu,
    count: int,
    limits: Limits,
    workload: Workload | None = None,
    tower: TowerConfig | None = None,
) -> Layout:
    """Find the layout for `serve --gpus auto`; `count // layout.n_ranks` replicas have it. Raises BadInput if no layout
    holds the model."""
    planner = Planner(source, gpu, limits, tower=tower)
    return compare(planner, count, workload or Workload()).plans[0].layout


def compare(
    planner: Planner,
    count: int,
    workload: Workload,
    layouts: Sequence[Layout] | None = None,
    decode_context: int = 4096,
) -> Comparison:
    """`layouts`: all that are sensible by default. BadInput, with what would help, if none holds the model."""
    found, wanted = Comparison(), None if workload.split is None else sum(workload.split)
    for layout in sensible_layouts(planner.config, planner.gpu, count, wanted) if layouts is None else layouts:
        replicas = check_count(layout, count, workload)
        try:
            found.plans.append(planner.plan(layout, workload, replicas, decode_context))
        except DoesNotFit as error:
            found.refused.append(Refusal(layout, str(error), error.missing))
        except (BadInput, BadCheckpoint) as error:  # such as a quantized matrix whose groups do not divide
            if layouts is None and layout.n_ranks > 1:
                continue
            if isinstance(error, BadInput) or layout.n_ranks == 1:
                raise
            raise BadInput(f"{layout.name}: {error}", param="layout") from None
    found.plans.sort(key=lambda plan: (-plan.tokens_s, plan.itl_ms, plan.gpus))
    if not found.plans:
        raise BadInput(_remedies(planner, count, found.refused, workload), param="gpus")
    return found


def sensible_layouts(config: ModelConfig, gpu: Gpu, count: int, replicas: int | None = None) -> Iterator[Layout]:
    """Layouts for `replicas`, else for all that divide the GPUs. Tensor parallelism stays inside a machine."""
    for ranks in divisors(count):
        if ranks <= MAX_RANKS and replicas in (None, count / ranks):
            for tp in divisors(ranks):
                if tp <= gpu.gpus_per_machine:
                    yield from (layout for layout in _of(config, tp, ranks // tp) if _divides(config, layout))


def _of(config: ModelConfig, tp: int, pp: int) -> Iterable[Layout]:
    contexts = {1, tp} if config.latent is not None else {1}
    experts = (False, True) if config.moe is not None and tp > 1 else (False,)
    return [Layout(tp=tp, pp=pp, ep=ep, dcp=dcp) for dcp in sorted(contexts) for ep in experts]


def _divides(config: ModelConfig, layout: Layout) -> bool:
    try:
        check_layout(config, layout)
    except BadInput:
        return False
    return True


def check_count(layout: Layout, count: int, workload: Workload) -> int:
    """How many replicas the GPUs hold; BadInput where they do not divide."""
    if count % layout.n_ranks:
        raise BadInput(
            f"{layout.name} takes {layout.n_ranks} GPUs, which do not divide {count}:"
            f" give layouts of {nearest_divisors(count, layout.n_ranks)} GPUs",
            param="layout",
        )
    replicas = count // layout.n_ranks
    if workload.split is not None and sum(workload.split) != replicas:
        prefill, decode = workload.split
        raise BadInput(
            f"{prefill}:{decode} are {prefill + decode} replicas, and {count} GPUs hold {replicas} of {layout.name}",
            param="prefill_decode",
        )
    return replicas


# --- what would help --------------------------------------------------------------------------------------------------


def _remedies(planner: Planner, count: int, refused: list[Refusal], workload: Workload) -> str:
    if not refused:
        return _no_layout(planner, count, workload)
    least = min(refused, key=lambda each: each.missing)
    help_by = [*_more_gpus(planner, count, workload), *_other_gpus(planner, least), *_quantized(planner, least)]
    if "a request has" in least.reason:
        help_by.append("shorter requests (--input-tokens, --output-tokens)")
    if least.missing < SMALL:
        help_by.append("a smaller --token-budget or --max-running")
    hold = "does not hold" if count == 1 else "do not hold"
    would = f". What would: {', '.join(help_by)}" if help_by else ""
    return f"{count} × {planner.gpu.name} {hold} the model. {least.reason}{would}"


def _more_gpus(planner: Planner, count: int, workload: Workload) -> list[str]:
    """The smallest number, in powers of two, that holds it in some layout."""
    unsplit = msgspec.structs.replace(workload, split=None)
    n = 1 << count.bit_length()
    while n <= MAX_RANKS:
        for layout in sensible_layouts(planner.config, planner.gpu, n, 1):
            try:
                planner.plan(layout, unsplit)
            except (BadInput, BadCheckpoint):
                continue
            return [f"{n} GPUs"]
        n *= 2
    return []


def _no_layout(planner: Planner, count: int, workload: Workload) -> str:
    if workload.split is not None:
        replicas = sum(workload.split)
        return f"{count} GPUs cannot be divided among {replicas} replicas: give a multiple of {replicas}"
    works = [n for n in range(1, 2 * count) if any(True for _ in sensible_layouts(planner.config, planner.gpu, n))]
    near = sorted(works, key=lambda n: abs(n - count))[:2]
    return f"no layout divides the model among {count} GPUs: try {' or '.join(map(str, sorted(near)))}"


def _other_gpus(planner: Planner, least: Refusal) -> list[str]:
    needed = planner.gpu.memory + least.missing
    larger = sorted((gpu for gpu in GPUS.values() if gpu.memory > needed and gpu.runs_kernels), key=lambda g: g.memory)
    return [f"as many {larger[0].name} ({larger[0].memory_gib:.0f} GiB each)"] if larger else []


def _quantized(planner: Planner, least: Refusal) -> list[str]:
    """Forms of the checkpoint that would fit, where it is not quantized yet."""
    if planner.is_quantized:
        return []
    per_gpu = planner.checkpoint_bytes / least.layout.n_ranks
    return [f"the model in {name}" for name, share in QUANTIZED.items() if (1 - share) * per_gpu > least.missing][:1]
