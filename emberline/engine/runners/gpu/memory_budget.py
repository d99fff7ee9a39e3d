"""The memory budget of an accelerator: counted before it is allocated, shown in the log, and kept to."""

from dataclasses import dataclass

from emberline.engine.core.limits import Limits
from emberline.engine.runners.gpu.shapes import CHUNK_ROWS, MAX_GRAPH_TOKENS, max_graphs, table_width
from emberline.protocol.errors import BadInput

GIB = 1 << 30
CONTEXT_BYTES = 600 << 20  # of a process's CUDA context; measured
_GRAPH_BYTES = 2 << 20  # of a captured step of 32 dense layers; measured
_LIBRARY_BYTES = 160 << 20  # code of kernels and libraries, workspaces of cuBLAS, small tensors; measured


@dataclass(frozen=True, slots=True)
class DeviceMemoryBudget:
    """Bytes of an accelerator, counted before they are allocated."""

    total: int
    elsewhere: int  # the driver and other processes, and what is left to them
    weights: int
    workspace: int
    state: int  # tables and buffers by slot, including the sampler
    reserve: int  # what is allocated later: CUDA graphs, libraries, results of attention
    kv: int

    @property
    def free(self) -> int:
        return self.total - self.elsewhere - self.weights - self.workspace - self.state - self.reserve - self.kv

    def table(self) -> str:
        parts = ("weights", "kv", "workspace", "state", "reserve", "elsewhere", "free")
        cells = [f"{name} {getattr(self, name) / GIB:.2f}" for name in parts]
        return f"memory, GiB of {self.total / GIB:.2f}: " + ", ".join(cells)


def runner_state_bytes(limits: Limits, n_groups: int) -> int:
    """Return the bytes that the GPU runner keeps: block tables (of slots, of decode rows, of mixed steps), packets,
    outputs."""
    n_rows = limits.max_running + CHUNK_ROWS
    tables = 3 * n_groups * n_rows * table_width(limits.context_len) * 4
    tokens = max(limits.token_budget, MAX_GRAPH_TOKENS)
    return tables + tokens * 8 + n_rows * 1024 + (1 << 20)


def reserve_bytes(
    limits: Limits, n_groups: int, result_bytes: int, dense_layers: float = 32, speculates: bool = False
) -> int:
    """Return the bytes that steps allocate beyond workspace and state: graphs, tables of mixed steps, results of
    cuDNN's attention.

    `result_bytes`: of a token, in one layer. `dense_layers`: number of dense layers with as many launches as the
    model's layers.
    """
    n_rows = limits.max_running + CHUNK_ROWS
    tables = 2 * n_groups * n_rows * table_width(limits.context_len) * 4
    results = 2 * limits.token_budget * result_bytes
    graphs = max_graphs(limits.max_running, speculates) * graph_bytes(max(32.0, dense_layers))
    return _LIBRARY_BYTES + graphs + tables + results


def graph_bytes(dense_layers: float) -> int:
    """Return the bytes of a CUDA graph with that many layers."""
    return int(_GRAPH_BYTES * dense_layers / 32)


def device_memory_budget(
    total: int, free: int, weights: int, workspace: int, state: int, reserve: int, allocated: int,
    kv_bytes: int | None, share: float = 1.0,
) -> DeviceMemoryBudget:  # fmt: skip
    """`free` and `allocated` are current; `allocated` includes the weights and what else is already taken.

    A `share` below 1 leaves the rest of the device, and the CUDA contexts, to other processes, started or not.
    """
    elsewhere = total - free - allocated
    if share < 1:
        elsewhere = max(elsewhere, total - int(share * total) + CONTEXT_BYTES)
    most = total - elsewhere - weights - workspace - state - reserve
    if most <= 0 or (kv_bytes is not None and kv_bytes > most):
        raise BadInput(
            f"{(total - elsewhere) / GIB:.1f} GiB of the device are available; weights take {weights / GIB:.1f},"
            f" a step {(workspace + state + reserve) / GIB:.1f}: {_short(most, kv_bytes)}; {_remedies(share)}",
            param="kv_bytes",
        )
    return DeviceMemoryBudget(total, elsewhere, weights, workspace, state, reserve, kv_bytes or most)


def _short(most: int, kv_bytes: int | None) -> str:
    if most <= 0:
        return f"{(1 - most) / GIB:.1f} too many, before any KV"
    return f"that leaves {most / GIB:.1f} for KV, {((kv_bytes or 0) - most) / GIB:.1f} fewer than asked"


def _remedies(share: float) -> str:
    more = "a larger --gpu-memory-share, " if share < 1 else ""
    return f"give {more}a smaller --kv-bytes or --token-budget, a quantized checkpoint, or a GPU with more memory"
