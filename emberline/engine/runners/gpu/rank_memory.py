"""The memory that a rank takes of its device: what the engine's budget and `emberline plan` count with.

They follow from the rank's model, whose tensors may be without memory (`models.registry.lay_out`), and from the limits.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from emberline.engine.core.limits import Limits
from emberline.engine.runners.gpu.draft_chain import ChainShape, DraftChain
from emberline.engine.runners.gpu.draft_model_chain import MODEL_CHAIN_DEPTHS, DraftModelChain
from emberline.engine.runners.gpu.memory_budget import graph_bytes, reserve_bytes, runner_state_bytes
from emberline.engine.runners.gpu.shapes import CHUNK_ROWS, MAX_GRAPH_TOKENS, max_draws, table_width, verify_rows
from emberline.kernels.backend import LatentAttention, MoE
from emberline.kernels.gpu.backend.workspace import Workspace, WorkspaceSizes
from emberline.kernels.gpu.formats.registry import loading_bytes, workspace_needs
from emberline.kernels.gpu.sampler_table import SamplerTable
from emberline.models.decoder import Decoder
from emberline.models.draft_head import GpuDraftHead
from emberline.models.draft_model import DraftModel
from emberline.models.shard import Shard
from emberline.protocol.block_hash import bytes_per_token

NCCL_BYTES = 600 << 20  # of a communicator, which is made when it is first used; published, not measured
PEER_BYTES = 17 << 20  # of a region that the other ranks of a group map


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that steps take beside weights and KV cache, known before anything is allocated."""

    sizes: WorkspaceSizes
    workspace: int
    state: int  # tables and buffers by slot, including the sampler
    reserve: int  # allocated later: CUDA graphs, libraries, results of attention
    collectives: int  # buffers that the other ranks of the group read
    draft_sizes: WorkspaceSizes | None = None  # of a draft model's own workspace, which `workspace` includes

    @property
    def total(self) -> int:
        return self.workspace + self.state + self.reserve + self.collectives

    @classmethod
    def of(
        cls, model: Decoder, limits: Limits, speculates: bool = False, head: GpuDraftHead | DraftModel | None = None
    ) -> "StepMemory":
        n_rows, n_groups = limits.max_running + CHUNK_ROWS, len(model.kv_groups)
        n_tokens = max(limits.token_budget, MAX_GRAPH_TOKENS)
        n_draws = max_draws(limits.max_running) if speculates else n_rows
        verified = verify_rows(limits.max_running) if speculates else 0
        layer = head.layer if isinstance(head, GpuDraftHead) else None
        sizes = WorkspaceSizes.of(
            model, n_tokens, n_rows, n_draws, verify_rows=verified, head=layer, **workspace_needs(model.matrices)
        )
        sampler = SamplerTable.bytes(limits.max_running, limits.vocab_size, n_draws)
        state, chains, draft_sizes = sampler, 0, None
        dense_layers, width = _dense_layers(model), table_width(limits.context_len)
        if head is not None:
            n_groups += len(head.kv_groups)
            state += (limits.max_running + 1) * sum(group.block_bytes for group in head.kv_groups)  # scratch
        if isinstance(head, GpuDraftHead):
            state += DraftChain.state_bytes(head, limits.max_running, max(n_tokens, n_draws), width)
        elif head is not None:
            state += DraftModelChain.state_bytes(head, limits.max_running, width)
            draft, n_samples = head.decoder, limits.max_running
            draft_sizes = WorkspaceSizes.of(
                draft,
                n_tokens,
                n_rows,
                n_samples,
                verify_rows=verified,
                head=None,
                **workspace_needs(draft.matrices),
            )
            dense_layers += _dense_layers(draft)
            depth = sum(shape.depth for shape in ChainShape.all(limits.max_running, MODEL_CHAIN_DEPTHS))
            chains = graph_bytes(depth * _dense_layers(draft))
        result = max(2 * attn.output_dim + 4 * attn.heads for attn in model.attentions)  # bf16; float32 log-sum-exp
        reserve = reserve_bytes(limits, n_groups, result, dense_layers, speculates) + chains
        reserve += loading_bytes(model.matrices)
        workspace = Workspace.bytes(sizes) + (0 if draft_sizes is None else Workspace.bytes(draft_sizes))
        state += runner_state_bytes(limits, n_groups)
        return cls(sizes, workspace, state, reserve, collective_bytes(model.shard), draft_sizes)


def _dense_layers(model: Decoder) -> float:
    """Return the number of dense layers with as many launches as the model's layers."""
    latent = sum(isinstance(attn, LatentAttention) for attn in model.attentions)
    experts = sum(isinstance(block, MoE) for block in model.feed_forwards)
    return len(model.layers) + 0.6 * (latent + experts)  # each has about five launches more


def collective_bytes(shard: Shard) -> int:
    """Return the bytes of the groups that a rank belongs to: its stage, its share of tokens where that is not all, and
    the neighboring stages."""
    layout, stage = shard.layout, shard.position.stage
    n_groups = (layout.tp > 1) + (1 < layout.dcp < layout.tp)
    n_neighbors = (stage > 0) + (stage < layout.pp - 1)
    return n_groups * (NCCL_BYTES + PEER_BYTES) + n_neighbors * NCCL_BYTES


def bound_context(limits: Limits, model: Decoder, room: int) -> Limits:
    """Limits whose context is no longer than `room` bytes of KV could hold: tables of blocks follow from it.

    Llama 4 Scout's tables for its ten million tokens would take 7 GiB.
    """
    per_token = bytes_per_token(model.kv_groups)
    if not per_token or room <= 0:
        return limits
    return replace(limits, context_len=min(limits.context_len, max(1, int(room / per_token))))


def weight_bytes(model: Decoder) -> int:
    """Return the bytes of all layers, embedding and head. Layers of a plan share tensors that a model on a device has
    for each."""
    return sum(map(tensor_bytes, model.layers)) + tensor_bytes([model.embedding, model.head])


def draft_weight_bytes(head: GpuDraftHead | DraftModel) -> int:
    return weight_bytes(head.decoder) if isinstance(head, DraftModel) else tensor_bytes([head.layer, head.matrices])


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors inside a dataclass, storage that several share counted once."""
    return sum(_storages(value).values())


def _storages(value: Any) -> dict[int, int]:
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    inner: Iterable[Any] = ()
    if isinstance(value, list | tuple):
        inner = value
    elif is_dataclass(value):
        inner = [getattr(value, field.name) for field in fields(value)]
    found: dict[int, int] = {}
    for each in inner:
        found |= _storages(each)
    return found
