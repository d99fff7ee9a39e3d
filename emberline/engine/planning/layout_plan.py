"""Predicts what a model takes of the GPUs of one layout, what is left for its KV cache, and how fast it runs, before
it is loaded.

A plan builds the engine's own model of each stage on torch's meta device, whose tensors have sizes and no memory: it
counts what the engine allocates because it is the same code.
"""

from collections.abc import Callable, Collection
from functools import cached_property
from math import ceil
from typing import NamedTuple

import msgspec

from emberline.engine import composition
from emberline.engine.core.limits import Limits
from emberline.engine.images.tower_loading import image_bytes
from emberline.engine.planning.hardware import GIB, Gpu
from emberline.engine.planning.step_time import StageWork, Step, StepSeconds
from emberline.engine.runners.gpu.memory_budget import device_memory_budget
from emberline.engine.runners.gpu.rank_memory import StepMemory, bound_context, draft_weight_bytes, weight_bytes
from emberline.engine.runners.gpu.weight_storage import (
    FASTER_GPUS,
    Room,
    WeightStorage,
    choose,
    few_sequences,
    wanted_kv_bytes,
)
from emberline.kernels.backend import Layer
from emberline.kv.groups import all_sequences, one_sequence, split_bytes
from emberline.models.decoder import Decoder
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel
from emberline.models.registry import lay_out
from emberline.models.shard import Shard, check_layout, loopback_groups
from emberline.models.vision.loading import tower_bytes
from emberline.protocol.block_hash import KVGroup
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout, Position, StageSplit
from emberline.weights.model_config import ModelConfig
from emberline.weights.outline import TensorSource, layer_kinds
from emberline.weights.stage_balance import ModelCost, balance_stages, predict_cost
from emberline.weights.tensors import FORMATS
from emberline.weights.vision_config import TowerConfig

DECODE_BATCHES = (1, 8, 32, 64, 256)
DRIVE_GB_S = 3.0
START_S = 2.3  # beyond reading the weights, with compiled kernels; measured
LEAST_START_S = 9.0  # of a model that is read sooner; measured


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of all replicas together."""

    input_tokens: int = 4096
    output_tokens: int = 512
    concurrency: int = 32  # sequences that run at once
    split: tuple[int, int] | None = None  # prefill and decode replicas; None: every replica does both

    @property
    def request_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of each GPU of a pipeline stage; without pipeline parallelism, of each GPU."""

    layers: tuple[int, int]  # the first, and the one behind the last
    context_bytes: int  # of the driver and the CUDA context
    weights_bytes: int  # with those of a draft head or model
    workspace_bytes: int  # activations
    state_bytes: int  # tables and buffers by slot, including the sampler
    reserve_bytes: int  # CUDA graphs, libraries, results of attention
    collective_bytes: int  # buffers for other ranks
    kv_bytes: int  # with that of a draft head or model
    draft_weights_bytes: int = 0
    draft_kv_bytes: int = 0
    tower_bytes: int = 0  # the GPU's share of the vision tower: of the first stage
    image_bytes: int = 0  # rows of images that are kept, and memory to encode one


class DecodeSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill/decode disaggregation of equal replicas, by rate matching."""

    prefill: int  # replicas
    decode: int
    requests_s: float
    ratio: float  # prefill replicas for each decode replica where both are busy all the time


class LayoutPlan(msgspec.Struct, frozen=True, kw_only=True):
    layout: Layout
    gpus: int  # of one replica
    replicas: int
    memory_bytes: int  # of a GPU: the model's share of it
    stages: tuple[StagePlan, ...]
    stage_imbalance: float  # time of the slowest stage over the mean
    weights_bytes: int  # of a replica
    kv_bytes: int  # of a replica, all its GPUs together
    kv_bytes_per_token: float  # of all GPUs together; a window's layers keep fewer tokens
    kv_tokens: int  # of a replica's sequences together
    context_len: int  # of one sequence
    sequences: int  # of a replica, at once: what the workload asks for, the limits allow and the KV cache holds
    ttft_s: float  # of a prompt that waits for no other
    itl_ms: float  # of a step that only decodes
    itl_collective_ms: float  # of that, what ranks say to each other
    tokens_s: float  # of all replicas; where they do both, prompts are computed between the steps
    split: DecodeSplit  # the best, or the one that was asked for
    decode_step_ms: dict[str, float]  # by sequences, each at `decode_context` tokens
    decode_context: int
    start_s: float
    compressed: bool = False  # BF16 weights are packed losslessly in a GPU's memory

    @property
    def rank_weights_bytes(self) -> int:
        """Bytes of weights of the fullest GPU."""
        return max(stage.weights_bytes + stage.tower_bytes for stage in self.stages)


class DoesNotFit(BadInput):
    """`missing`: bytes of a GPU that the layout would need more."""

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message, param="gpus")
        self.missing = missing


class _Stage(NamedTuple):
    """A pipeline stage as a rank of it builds it."""

    model: Decoder
    head: GpuDraftHead | DraftModel | None

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return (*self.model.kv_groups, *(() if self.head is None else self.head.kv_groups))

    @property
    def work(self) -> list[StageWork]:
        """In every step, one after the other."""
        models = [self.model, *([self.head.decoder] if isinstance(self.head, DraftModel) else [])]
        return [StageWork(model) for model in models]

    @property
    def draft_weights(self) -> int:
        return 0 if self.head is None else draft_weight_bytes(self.head)


class _TowerShare(NamedTuple):
    """Bytes of a vision tower on a GPU of the first stage, and those that encoding needs beside it."""

    weights: int
    images: int

    @classmethod
    def of(cls, config: TowerConfig | None, layout: Layout) -> "_TowerShare":
        if config is None:
            return cls(0, 0)
        return cls(tower_bytes(config, n_ranks=layout.tp), image_bytes(config, layout.tp))


class Planner:
    """Plans layouts of one model on one kind of GPU. Kinds of layers are laid out once for layouts that share them."""

    def __init__(
        self,
        source: TensorSource,
        gpu: Gpu,
        limits: Limits,
        kv_bytes: int | None = None,
        memory_share: float = 1.0,
        drive_gb_s: float = DRIVE_GB_S,
        drafting: Callable[[Decoder], GpuDraftHead | DraftModel] | None = None,
        features: Collection[str] = (),
        tower: TowerConfig | None = None,
        weights: WeightStorage = "plain",
    ) -> None:
        """drafting: the head or model that drafts for a model, without memory as the model itself is. features: names
        of what is asked for besides layouts (`engine.composition`). tower: the model's vision tower.
        weights: how BF16 matrices are kept in a GPU's memory."""
        self._weights = weights
        self._tower = tower
        self._features = {*features, "gpu"}
        self.source, self.gpu, self.limits = source, gpu, limits
        self._drafting = drafting
        self.config: ModelConfig = source.config
        self._kv_bytes, self._share, self._drive = kv_bytes, memory_share, drive_gb_s
        self._made: dict[tuple[int, bool, bool], dict[int, Layer]] = {}

    @cached_property
    def _kinds(self) -> list[int]:
        return layer_kinds(self.source)

    @cached_property
    def cost(self) -> ModelCost:
        return predict_cost(self.source)

    @property
    def checkpoint_bytes(self) -> int:
        cost = self.cost
        layers = sum(layer.n_bytes for layer in cost.layers)
        return layers + cost.embedding.n_bytes + cost.head.n_bytes + tower_bytes(self._tower)

    @property
    def is_quantized(self) -> bool:
        """True if the checkpoint has matrices of codes."""
        kinds = (self.source.weight(name).kind for name in self.source.names)
        return any(FORMATS[kind].is_quantized for kind in kinds)

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes that a start reads: fewer than the checkpoint's if it is compressed on disk."""
        weights = [self.source.weight(name) for name in self.source.names]
        decoded = sum(weight.nbytes for weight in weights)
        return int(self.checkpoint_bytes * sum(weight.stored_bytes for weight in weights) / max(1, decoded))

    def plan(self, layout: Layout, workload: Workload, replicas: int = 1, decode_context: int = 4096) -> LayoutPlan:
        """Raises DoesNotFit, saying by how much; BadInput for a layout that does not divide the model."""
        check_layout(self.config, layout)
        composition.check(self._features | composition.of_layout(layout))
        split = balance_stages(self.cost, layout.pp)
        compress = self._compresses(layout, split)
        parts = [self._stage(layout, split, stage, compress) for stage in range(layout.pp)]
        # Rows of images are embeddings: the first stage divides the tower.
        towers = [_TowerShare.of(self._tower, layout), *[_TowerShare(0, 0)] * (layout.pp - 1)]
        memory = [self._memory(part, layout, tower) for part, tower in zip(parts, towers, strict=True)]
        blocks = _common_blocks(parts, memory, self.limits)
        stages, chunk = [], self.limits.token_budget
        for part, (step, weights, _), n_blocks, tower in zip(parts, memory, blocks, towers, strict=True):
            model, n_own = part.model, len(part.model.kv_groups)
            sizes = [n * group.block_bytes for n, group in zip(n_blocks, part.kv_groups, strict=True)]
            stages.append(
                StagePlan(
                    layers=(model.shard.layers.start, model.shard.layers.stop),
                    context_bytes=int(self.gpu.context_gib * GIB),
                    weights_bytes=weights - tower.weights,
                    workspace_bytes=step.workspace,
                    state_bytes=step.state,
                    reserve_bytes=step.reserve,
                    collective_bytes=step.collectives,
                    kv_bytes=sum(sizes),
                    draft_weights_bytes=part.draft_weights,
                    draft_kv_bytes=sum(sizes[n_own:]),
                    tower_bytes=tower.weights,
                    image_bytes=tower.images,
                )
            )
        kv_tokens = min(map(all_sequences, blocks))
        longest = min(one_sequence(part.kv_groups, n, chunk) for part, n in zip(parts, blocks, strict=True))
        if kv_tokens < workload.request_tokens:
            short = int((workload.request_tokens / kv_tokens - 1) * max(stage.kv_bytes for stage in stages))
            raise DoesNotFit(
                f"{layout.name}: the KV cache holds {kv_tokens:,} tokens, and a request has"
                f" {workload.request_tokens:,}",
                short,
            )
        times = StepTimes([part.work for part in parts], self.gpu, self.limits.token_budget)
        kv_bytes = layout.tp * sum(stage.kv_bytes for stage in stages)
        most = max(1, min(self.limits.max_running, kv_tokens // workload.request_tokens))
        rates = _rate_matching(times, workload, replicas, most)
        decoders = replicas if workload.split is None else workload.split[1]
        sequences = min(most, ceil(workload.concurrency / decoders))
        prefill, decode = times.prefill(workload.input_tokens), times.decode(sequences, _mean_context(workload))
        per_step = decode.total + sequences * prefill.busy_s / workload.output_tokens
        tokens_s = rates.requests_s * workload.output_tokens if workload.split else replicas * sequences / per_step
        return LayoutPlan(
            layout=layout,
            gpus=layout.n_ranks,
            replicas=replicas,
            memory_bytes=int(self._share * self.gpu.memory),
            stages=tuple(stages),
            stage_imbalance=self.cost.imbalance(split),
            weights_bytes=layout.tp * sum(stage.weights_bytes + stage.tower_bytes for stage in stages),
            kv_bytes=kv_bytes,
            kv_bytes_per_token=kv_bytes / kv_tokens,
            kv_tokens=kv_tokens,
            context_len=min(self.limits.context_len, longest),
            sequences=sequences,
            ttft_s=prefill.ttft_s,
            itl_ms=1e3 * decode.total,
            itl_collective_ms=1e3 * decode.collectives,
            tokens_s=tokens_s,
            split=rates,
            decode_step_ms={
                str(rows): 1e3 * times.decode(rows, decode_context).total
                for rows in DECODE_BATCHES
                if rows <= self.limits.max_running
            },
            decode_context=decode_context,
            start_s=self.start_s,
            compressed=compress,
        )

    @property
    def start_s(self) -> float:
        """From the drive of one machine, which all its ranks read; with compiled kernels."""
        return max(LEAST_START_S, self.stored_bytes / (1e9 * self._drive) + START_S)

    def _compresses(self, layout: Layout, split: StageSplit) -> bool:
        """True if a worker of the layout would pack its weights: the fullest stage decides for the plan."""
        if self._weights == "plain":
            return False
        return any(choose(self._weights, self._room(layout, split, stage)).compress for stage in range(layout.pp))

    def _room(self, layout: Layout, split: StageSplit, stage: int) -> Room:
        """Bytes of a GPU of the stage, as a worker there counts them."""
        plain, packed = (self._stage(layout, split, stage, compress) for compress in (False, True))
        tower = _TowerShare(0, 0) if stage else _TowerShare.of(self._tower, layout)
        taken = weight_bytes(plain.model) + plain.draft_weights + sum(tower)
        free = self.gpu.memory - int(self.gpu.context_gib * GIB) - taken
        limits = bound_context(self.limits, plain.model, max(0, free))
        step = StepMemory.of(plain.model, limits, speculates=True, head=plain.head)
        room = int(self._share * self.gpu.memory) - self.gpu.memory + free - step.total
        wanted = wanted_kv_bytes(plain.model, self.limits, self._kv_bytes)
        few = few_sequences(self.limits, self.gpu.name in FASTER_GPUS)
        return Room(weight_bytes(plain.model), weight_bytes(packed.model), room, wanted, few)

    def _stage(self, layout: Layout, split: StageSplit, stage: int, compress: bool = False) -> _Stage:
        """Work of the stage's last rank, which has the most where the vocabulary does not divide."""
        position = Position(stage, layout.tp - 1)
        shard = Shard.of(self.config, layout, position, loopback_groups(layout, position), split)
        made = self._made.setdefault((layout.tp, layout.ep, compress), {})
        model = lay_out(self.source, self._kinds, shard, made, compress)
        return _Stage(model, None if self._drafting is None else self._drafting(model))

    def _memory(self, part: _Stage, layout: Layout, tower: "_TowerShare") -> tuple[StepMemory, int, int]:
        """Memory of steps, bytes of weights with a tower's, and bytes left for KV: of the stage's fullest GPU."""
        weights, total = weight_bytes(part.model) + part.draft_weights + tower.weights, self.gpu.memory
        free = total - int(self.gpu.context_gib * GIB) - weights
        step = StepMemory.of(part.model, bound_context(self.limits, part.model, free), speculates=True, head=part.head)
        room = int(self._share * total) - total + free - step.total - tower.images
        if room <= 0:
            needed = f"weights take {weights / GIB:.1f} GiB of a GPU, steps {(step.total + tower.images) / GIB:.1f}"
            raise DoesNotFit(
                f"{layout.name}: {needed}, of {self._share * total / GIB:.1f}: {-room / GIB:.1f} GiB too many,"
                " before any KV",
                -room,
            )
        try:
            budget = device_memory_budget(
                total, free, weights, step.workspace, step.state, step.reserve + step.collectives + tower.images,
                weights, self._kv_bytes, self._share,
            )  # fmt: skip
            split_bytes(part.kv_groups, budget.kv, self.limits.token_budget, self.limits.max_running)
        except BadInput as error:  # too little for the KV that was asked for, or for any
            raise DoesNotFit(f"{layout.name}: {error}", (self._kv_bytes or room) - room) from None
        return step, weights, budget.kv


class PrefillSeconds(msgspec.Struct, frozen=True):
    ttft_s: float
    busy_s: float  # of the slowest stage: how soon the next prompt may follow


class StepTimes:
    """Steps of a group of ranks, from those of its stages. Of these each has a micro-batch of its own."""

    def __init__(self, stages: list[list[StageWork]], gpu: Gpu, token_budget: int) -> None:
        self._stages, self._gpu, self._budget = stages, gpu, token_budget

    def decode(self, rows: int, context: int) -> StepSeconds:
        """A sequence's next token comes when its micro-batch has passed all stages, the slowest behind all others."""
        n_batches = min(rows, len(self._stages))
        stages = self._seconds(Step(ceil(rows / n_batches), 1, context))
        through = _sum(stages)
        waiting = max(0.0, n_batches * max(each.total for each in stages) - through.total)
        return StepSeconds(through.compute + waiting, through.collectives)

    def prefill(self, tokens: int) -> PrefillSeconds:
        """In chunks of the token budget, which follow each other through the stages."""
        busy = through = 0.0
        for start in range(0, tokens, self._budget):
            stages = self._seconds(Step(1, min(self._budget, tokens - start), start))
            slowest = max(each.total for each in stages)
            busy += slowest
            through = _sum(stages).total - slowest
        return PrefillSeconds(busy + through, busy)

    def _seconds(self, step: Step) -> list[StepSeconds]:
        """Seconds of the step on each stage."""
        return [_sum([work.seconds(self._gpu, step) for work in stage]) for stage in self._stages]


def _sum(parts: list[StepSeconds]) -> StepSeconds:
    return StepSeconds(*map(sum, zip(*parts, strict=True)))


def _rate_matching(times: StepTimes, workload: Workload, replicas: int, most: int) -> DecodeSplit:
    """Prefill and decode replicas that keep each other busy; of one, as if there were two. `most`: sequences."""
    busy_s = times.prefill(workload.input_tokens).busy_s

    def decode_rate(decoders: int) -> float:
        rows = min(most, ceil(workload.concurrency / decoders))
        return decoders * rows / (workload.output_tokens * times.decode(rows, _mean_context(workload)).total)

    total = max(2, replicas)
    choices = range(1, total) if workload.split is None else [workload.split[0]]
    rates = {n: min(n / busy_s, decode_rate(total - n)) for n in choices}
    best = max(rates, key=lambda n: rates[n])
    ratio = decode_rate(total - best) / (total - best) * busy_s
    return DecodeSplit(prefill=best, decode=total - best, requests_s=rates[best], ratio=ratio)


def _mean_context(workload: Workload) -> int:
    return workload.input_tokens + workload.output_tokens // 2


def _common_blocks(parts: list[_Stage], memory: list[tuple[StepMemory, int, int]], limits: Limits) -> list[list[int]]:
    """Blocks of each stage's KV groups: a block has the same number in all stages, so the smallest number counts."""
    found = [
        split_bytes(part.kv_groups, room, limits.token_budget, limits.max_running)
        for part, (_, _, room) in zip(parts, memory, strict=True)
    ]
    least: dict[str, int] = {}
    for part, numbers in zip(parts, found, strict=True):
        for group, n in zip(part.kv_groups, numbers, strict=True):
            least[group.name] = min(n, least.get(group.name, n))
    return [[least[group.name] for group in part.kv_groups] for part in parts]
