"""One rank of a layout alone on one GPU, with loopback collectives: its memory and step times are true, its tokens not.

`allocate` takes what the engine takes, without filling it, for any rank of a case, and compares that with the plan.
`alone` loads generated weights, and times steps by kind of layer.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels import time_us
from emberline.catalog.published_shapes import find_shape
from emberline.engine.core.limits import Limits
from emberline.engine.planning.hardware import GIB, GPUS, gpu_of_device
from emberline.engine.planning.layout_plan import LayoutPlan, Planner, StagePlan, Workload
from emberline.engine.planning.step_time import LayerSeconds, StageWork, Step, StepSeconds
from emberline.engine.runners.gpu.rank_memory import StepMemory, bound_context
from emberline.kernels.backend import Layer, MoE
from emberline.kernels.gpu.backend.triton_backend import TritonBackend
from emberline.kernels.gpu.backend.workspace import PrefillChunk, StepShape
from emberline.kernels.gpu.sampler_table import SamplerTable
from emberline.kv.block_pool import blocks_of
from emberline.kv.groups import all_sequences, split_bytes
from emberline.models.decoder import Decoder, StepInputs
from emberline.models.registry import ARCHITECTURES, lay_out, load_model
from emberline.models.shard import Shard, loopback_groups
from emberline.protocol.block_hash import BLOCK_TOKENS
from emberline.protocol.parallel_layout import Layout
from emberline.weights.generated import generate_checkpoint
from emberline.weights.loader import DeferredCheckpoint, WeightLoader
from emberline.weights.outline import OneOfEach, OutlineCheckpoint
from emberline.weights.stage_balance import split_stages

BATCHES = (1, 8, 32, 64)
CONTEXT = 8192  # tokens of each decoding sequence
PREFILLS = ((2048, 0), (2048, 30720))  # new tokens, and cached ones before them
TOKEN_BUDGET = 8192
TABLE_WIDTH = 4096  # blocks of the longest sequence
PROFILED_LAYERS = 4
NAMED_KERNELS = 8  # of a layer: those that take the most time


@dataclass(frozen=True)
class Case:
    """A model in a layout; `gpu` is the one whose memory is the limit, not the one that runs it."""

    model: str  # of emberline/catalog/shapes
    gpu: str
    layout: Layout
    ranks: tuple[int, ...]  # that `allocate` takes in turn; `alone` takes the first
    max_running: int = 256
    kv_gib: float | None = None  # of all ranks together, asked for
    kv_tokens: int | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.layout.name}"

    @cached_property
    def document(self) -> dict[str, Any]:
        shape = find_shape(self.model)
        assert shape is not None, self.model
        return shape.config

    @cached_property
    def source(self) -> OutlineCheckpoint:
        return OutlineCheckpoint(self.document)

    @cached_property
    def planner(self) -> Planner:
        config = self.source.config
        limits = Limits(config.context_len, config.vocab_size, (0,), self.max_running, TOKEN_BUDGET)
        return Planner(self.source, GPUS[self.gpu], limits)

    @cached_property
    def plan(self) -> LayoutPlan:
        return self.planner.plan(self.layout, Workload())

    def stage(self, rank: int) -> StagePlan:
        return self.plan.stages[self.layout.position(rank).stage]

    def shard(self, rank: int) -> Shard:
        position = self.layout.position(rank)
        groups, split = loopback_groups(self.layout, position), split_stages(self.source, self.layout.pp)
        return Shard.of(self.source.config, self.layout, position, groups, split)

    def step_memory(self, model: Decoder, weights: int) -> StepMemory:
        """As the plan counts it."""
        gpu = self.planner.gpu
        room = gpu.memory - int(gpu.context_gib * GIB) - weights
        return StepMemory.of(model, bound_context(self.planner.limits, model, room), speculates=True)


CASES = {
    "kimi": Case("kimi-k2.5", "H100", Layout(tp=8, dcp=8), (0, 7), kv_gib=30, kv_tokens=450_000),
    "kimi-ep": Case("kimi-k2.5", "H100", Layout(tp=8, dcp=8, ep=True), (0,)),
    "kimi-pp8": Case("kimi-k2.5", "H100", Layout(pp=8), (0, 4, 7)),
    "kimi-tp4-pp2": Case("kimi-k2.5", "H100", Layout(tp=4, pp=2), (0, 7)),
    "scout": Case("llama-4-scout", "H200", Layout(tp=2), (1,), max_running=12, kv_gib=56, kv_tokens=1_200_000),
    "glm": Case("glm-4.7-flash", "H100", Layout(tp=2, dcp=2), (0,)),
}


# --- plan against allocation ------------------------------------------------------------------------------------------


def allocate(case: Case, rank: int) -> dict[str, float]:
    """GiB that the rank's weights, workspace, sampler and KV pools take of the device, and what the plan says.

    `off`: of all of it, as the driver counts, beyond the plan; 0.01 is 1 %.
    """
    stage, config = case.stage(rank), case.source.config
    free_memory()
    before, shard = _used(), case.shard(rank)
    backend = TritonBackend("cuda", torch.bfloat16, groups=shard.groups)
    unread = DeferredCheckpoint(OneOfEach(shard.checkpoint(case.source)), WeightLoader("cuda"))
    model = Decoder(unread, backend, ARCHITECTURES[config.architecture], shard)
    weights = torch.cuda.memory_allocated()
    step = case.step_memory(model, weights)
    backend.reserve(step.sizes)
    workspace = torch.cuda.memory_allocated() - weights
    n_draws = step.sizes.max_samples
    taken = (
        SamplerTable(case.max_running, config.vocab_size, "cuda", max_rows=n_draws),
        torch.empty(stage.kv_bytes, dtype=torch.uint8, device="cuda"),  # the KV pools
    )
    device = _used() - before
    del taken
    sampler_bytes = SamplerTable.bytes(case.max_running, config.vocab_size, n_draws)
    planned = stage.weights_bytes + stage.workspace_bytes + sampler_bytes + stage.kv_bytes
    return {
        "weights_gib": weights / GIB,
        "planned_weights_gib": stage.weights_bytes / GIB,
        "workspace_gib": workspace / GIB,
        "planned_workspace_gib": stage.workspace_bytes / GIB,
        "device_gib": device / GIB,
        "planned_gib": planned / GIB,
        "weights_off": weights / stage.weights_bytes - 1,
        "off": device / planned - 1,
    }


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def free_memory() -> None:
    """Give back what torch's allocator holds and nothing uses."""
    gc.collect()
    torch.cuda.empty_cache()


# --- one rank with weights --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerTime:
    """Of a layer of one kind, in µs: a rank's of `n_ranks` that divide it, and by the plan's roofline one GPU's.

    `rank_us` is measured, without communication; the others follow from the plan.
    """

    kind: str
    n_layers: int
    n_ranks: int
    rank_us: float
    planned_rank_us: float
    collectives_us: float
    single_us: float

    @property
    def ideal_us(self) -> float:
        return self.single_us / self.n_ranks

    @property
    def efficiency(self) -> float:
        return self.ideal_us / (self.rank_us + self.collectives_us)

    @property
    def undivided_us(self) -> float:
        """What every rank computes and launches alike, by the plan."""
        return self.planned_rank_us - self.ideal_us

    @property
    def slower_us(self) -> float:
        """What the rank's kernels take beyond the roofline of its part."""
        return self.rank_us - self.planned_rank_us


def layer_times(
    rank_us: dict[str, float], rank: Sequence[LayerSeconds], single: Sequence[LayerSeconds], n_ranks: int
) -> list[LayerTime]:
    """rank_us: measured, by kind; `rank` and `single`: the plan's, of a rank and of one GPU."""
    planned, whole = _by_kind(rank), _by_kind(single)
    return [
        LayerTime(
            kind=kind,
            n_layers=planned[kind][0],
            n_ranks=n_ranks,
            rank_us=us,
            planned_rank_us=1e6 * planned[kind][1].compute,
            collectives_us=1e6 * planned[kind][1].collectives,
            single_us=1e6 * whole[kind][1].total,
        )
        for kind, us in rank_us.items()
    ]


def _by_kind(layers: Sequence[LayerSeconds]) -> dict[str, tuple[int, StepSeconds]]:
    """How many, and their mean: layers with a window and without are of one kind."""
    found = {}
    for has_experts in sorted({each.has_experts for each in layers}):
        some = [each for each in layers if each.has_experts == has_experts]
        n = sum(each.n for each in some)
        parts = (sum(each.n * each.seconds[part] for each in some) / n for part in (0, 1))
        found[_kind_name(has_experts)] = n, StepSeconds(*parts)
    return found


def _kind_name(has_experts: bool) -> str:
    return "experts" if has_experts else "dense"


class RankSteps:
    """A rank's model with KV pools, and steps of it."""

    def __init__(
        self, model: Decoder, kv: list[Tensor], timed: Callable[[Callable[[int], Any], int], float] = time_us
    ) -> None:
        self._model, self._kv, self._layers, self._timed = model, kv, model.layers, timed
        kinds = [_kind_name(isinstance(layer.feed_forward, MoE)) for layer in model.layers]
        self.kinds = {
            kind: [layer for layer, other in zip(model.layers, kinds, strict=True) if other == kind]
            for kind in sorted(set(kinds))
        }
        self._n_blocks = min(len(pool) for pool in kv) - 1  # but for the null block

    def decode_inputs(self, n_rows: int) -> StepInputs:
        """At `CONTEXT` tokens each, or as many as the pools hold."""
        n_blocks = min(blocks_of(CONTEXT), self._n_blocks // n_rows)
        tables = self._tables(n_rows, n_blocks)
        lens = self._ints([n_blocks * BLOCK_TOKENS] * n_rows)
        ids = self._token_ids(n_rows)
        samples = torch.arange(n_rows, device=self._model.device)
        starts = self._ints(range(n_rows + 1))
        return StepInputs(ids, lens - 1, starts, lens, [tables] * len(self._kv), samples, StepShape(n_rows))

    def prefill_inputs(self, n_tokens: int, n_cached: int) -> StepInputs | None:
        """None: the pools do not hold so many."""
        end = n_tokens + n_cached
        if blocks_of(end) > self._n_blocks:
            return None
        tables = self._tables(1, blocks_of(end))
        ids = self._token_ids(n_tokens)
        samples = torch.tensor([n_tokens - 1], device=self._model.device)
        shape = StepShape(0, n_tokens, chunks=[PrefillChunk(0, 0, n_tokens, end)])
        starts, positions = self._ints([0, n_tokens]), self._ints(range(n_cached, end))
        return StepInputs(ids, positions, starts, self._ints([end]), [tables] * len(self._kv), samples, shape)

    def _tables(self, n_rows: int, n_blocks: int) -> Tensor:
        tables = self._ints([0] * (n_rows * TABLE_WIDTH)).view(n_rows, TABLE_WIDTH)
        tables[:, :n_blocks] = self._ints(range(1, 1 + n_rows * n_blocks)).view(n_rows, n_blocks)
        return tables

    def _token_ids(self, n: int) -> Tensor:
        """Of the rank's own part of the vocabulary: others' are zeros here, and would all choose the same experts."""
        shard, size = self._model.shard, self._model.config.vocab_size
        parts, at = shard.vocabulary(size), shard.position.tp_rank
        first, generator = sum(parts[:at]), torch.Generator().manual_seed(1)
        return self._ints(torch.randint(first, first + parts[at], (n,), generator=generator).tolist())

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._model.device)

    def forward(self, inputs: StepInputs, layers: list[Layer] | None = None) -> None:
        """layers: those to run; None: all."""
        self._model.layers = self._layers if layers is None else layers
        try:
            self._model.forward(inputs, self._kv)
        finally:
            self._model.layers = self._layers

    def step_us(self, inputs: StepInputs, layers: list[Layer] | None = None) -> float:
        return self._timed(lambda i: self.forward(inputs, layers), 1)

    def layer_us(self, inputs: StepInputs) -> dict[str, float]:
        """Of one layer by kind: what the second half of the kind's layers adds to a step with the first half."""
        found = {}
        for kind, layers in self.kinds.items():
            half = layers[: len(layers) // 2]
            more_us = self.step_us(inputs, layers) - self.step_us(inputs, half)
            found[kind] = more_us / (len(layers) - len(half))
        return found

    def prefill_us(self, inputs: StepInputs, repeats: int = 3) -> float:
        """Not in a CUDA graph, as prompts are computed."""
        self.forward(inputs)
        times: list[float] = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            self.forward(inputs)
            torch.cuda.synchronize()
            times.append(1e6 * (time.perf_counter() - began_s))
        return median(times)

    def kernel_us(self, inputs: StepInputs, kind: str) -> dict[str, float]:
        """By kernel, of one layer: the profile of a step with a few of them less that of a step without layers."""
        few = self.kinds[kind][:PROFILED_LAYERS]
        some, none = self._profile(inputs, few), self._profile(inputs, [])
        each = {name: (us - none.get(name, 0.0)) / len(few) for name, us in some.items()}
        return dict(sorted(each.items(), key=lambda item: -item[1])[:NAMED_KERNELS])

    def _profile(self, inputs: StepInputs, layers: list[Layer]) -> dict[str, float]:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as taken:
            self.forward(inputs, layers)
            torch.cuda.synchronize()
        return {event.key: event.device_time_total for event in taken.key_averages()}


def alone(case: Case, rank: int, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Memory under the case's limit, and times of decode steps by kind of layer and of prompts."""
    gpu, stage = case.planner.gpu, case.stage(rank)
    limit = gpu.memory - int(gpu.context_gib * GIB)
    free_memory()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / torch.cuda.get_device_properties(0).total_memory))
    before, began_s = _used(), time.perf_counter()
    model = load_model(generate_checkpoint(case.document, 1), "cuda", shard=case.shard(rank))
    weights = torch.cuda.memory_allocated()
    step = case.step_memory(model, weights)
    model.kernels.reserve(step.sizes)
    loaded_s = time.perf_counter() - began_s
    n_blocks = split_bytes(model.kv_groups, limit - weights - step.total, TOKEN_BUDGET, case.max_running)
    kv = [
        torch.empty(n, *group.block_shape, dtype=torch.bfloat16, device="cuda").normal_()
        for n, group in zip(n_blocks, model.kv_groups, strict=True)
    ]
    kv_bytes = sum(pool.nbytes for pool in kv)
    return {
        "loaded_s": loaded_s,
        "weights_gib": weights / GIB,
        "weights_off": weights / stage.weights_bytes - 1,
        "kv_gib": case.layout.n_ranks * kv_bytes / GIB,  # of all ranks, as if all were like this one
        "kv_tokens": all_sequences(n_blocks),
        "kv_off": kv_bytes / stage.kv_bytes - 1,
        **_times(case, rank, RankSteps(model, kv), batches),
        "device_gib": (_used() - before) / GIB,  # after all steps, beside the CUDA context
        "limit_gib": limit / GIB,
    }


def _times(case: Case, rank: int, steps: RankSteps, batches: Sequence[int]) -> dict[str, Any]:
    card = gpu_of_device(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    planned, single = StageWork(lay_out(case.source, shard=case.shard(rank))), StageWork(lay_out(case.source))
    decode, prefill = {}, {}
    for n_rows in (each for each in batches if each <= case.max_running):
        inputs = steps.decode_inputs(n_rows)
        at = Step(n_rows, 1, int(inputs.context_lens[0]))
        measured = steps.layer_us(inputs)
        layers = layer_times(measured, planned.layers(card, at), single.layers(card, at), case.layout.tp)
        decode[str(n_rows)] = {
            "context": at.context,
            "step_us": steps.step_us(inputs),
            "ends_us": steps.step_us(inputs, []),  # embedding and head
            "layers": [asdict(each) | {"efficiency": each.efficiency} for each in layers],
            "kernels": {kind: steps.kernel_us(inputs, kind) for kind in steps.kinds},
        }
    for n_tokens, n_cached in PREFILLS:
        chunk = steps.prefill_inputs(n_tokens, n_cached)
        if chunk is not None:
            seconds = planned.seconds(card, Step(1, n_tokens, n_cached))
            times = {"ms": steps.prefill_us(chunk) / 1e3, "planned_ms": 1e3 * seconds.compute}
            prefill[f"{n_tokens} after {n_cached}"] = times
    return {"decode": decode, "prefill": prefill}
