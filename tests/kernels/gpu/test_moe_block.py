"""A mixture of experts on the GPU against the reference backend, padding and deterministic mode included."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from emberline.kernels.backend import MLP, MoE
from emberline.kernels.gpu.backend import workspace as workspace_module
from emberline.kernels.gpu.backend.matmul import Matmul
from emberline.kernels.gpu.backend.moe_block import _add_shared, mark_valid, run_moe
from emberline.kernels.gpu.backend.workspace import AttentionShape, ExpertsShape, Workspace, WorkspaceSizes
from emberline.kernels.gpu.expert_matrix import ExpertMatrix
from emberline.kernels.gpu.formats.dense import DenseMatrix
from emberline.kernels.moe import TorchExperts
from emberline.kernels.reference import TorchBackend, TorchMatrix
from emberline.kernels.routing import Routing
from emberline.protocol.parallel_layout import Layout
from tests.kernels.gpu.batches import DEVICE, DTYPE, LIMIT, error, noise

HIDDEN, WIDTH, EXPERTS = 64, 32, 8
ROUTINGS = {
    "shared": Routing(2, "sigmoid", n_groups=4, top_groups=2, scale=2.5),  # shared experts as an MLP
    "stored": Routing(2, "sigmoid", normalize=True, n_shared=1),  # shared experts stored with the routed ones
    "plain": Routing(3),
}


def blocks(name: str) -> tuple[MoE, MoE]:
    """The same block for the GPU and for the reference backend."""
    routing = ROUTINGS[name]
    n = EXPERTS + routing.n_shared
    gate_up, down = noise(n, 2 * WIDTH, HIDDEN, seed=1, scale=0.2), noise(n, HIDDEN, WIDTH, seed=2, scale=0.2)
    parts = noise(2 * WIDTH, HIDDEN, seed=3, scale=0.2), noise(HIDDEN, WIDTH, seed=4, scale=0.2)
    norm = noise(HIDDEN, seed=5).float() * 0.1 + 1
    more = {
        "norm": norm,
        "router": noise(EXPERTS, HIDDEN, seed=6),
        "router_bias": noise(EXPERTS, seed=7).float() if name == "plain" else None,
        "correction_bias": None if name == "plain" else noise(EXPERTS, seed=8).float() * 0.1,
        "routing": routing,
        "eps": 1e-5,
        "activation": "silu",
    }

    def shared(matrix: type[DenseMatrix] | type[TorchMatrix]) -> MLP | None:
        if name != "shared":
            return None
        both, out = (matrix(part, None) for part in parts)
        return MLP(norm=norm, gate_up=both, down=out, eps=1e-5, activation="silu")

    ours = [ExpertMatrix("dense", weight.shape[2], weight) for weight in (gate_up, down)]
    theirs = [TorchExperts(weight) for weight in (gate_up, down)]
    return (
        MoE(gate_up=ours[0], down=ours[1], shared=shared(DenseMatrix), **more),  # type: ignore[arg-type]
        MoE(gate_up=theirs[0], down=theirs[1], shared=shared(TorchMatrix), **more),  # type: ignore[arg-type]
    )


class SecondStream:
    """A stand-in for `Beside`, which needs a GPU: the second stream's kernels run at once, or as late as they may."""

    def __init__(self, workspace: Workspace, late: bool) -> None:
        self._workspace, self._late = workspace.beside(), late
        self._matmul = Matmul(self._workspace, False, False)
        self._waiting: list[tuple[MLP, Tensor, Tensor]] = []

    def add_shared(self, *args: Any) -> None:
        self._waiting.append(args)
        if not self._late:
            self.join()

    def join(self) -> None:
        while self._waiting:
            *tensors, add = self._waiting.pop()
            _add_shared(*tensors, self._workspace, self._matmul, add)


def run(
    moe: MoE, x: Tensor, valid: Tensor | None = None, deterministic: bool = False, late: bool | None = None
) -> Tensor:
    experts = ExpertsShape(len(moe.gate_up.weight), len(moe.router), moe.routing.slots, WIDTH)
    sizes = WorkspaceSizes(
        HIDDEN, 32, (AttentionShape(2, 1, 32),), WIDTH, 40, 4, 4, DTYPE.itemsize, experts=experts
    )  # fmt: skip
    workspace = Workspace(sizes, DEVICE, DTYPE)
    out = x.clone()
    valid = torch.ones(len(x), dtype=torch.int32, device=DEVICE) if valid is None else valid
    matmul = Matmul(workspace, deterministic, False)
    beside: Any = None if late is None else SecondStream(workspace, late)
    run_moe(moe, out, valid, workspace, matmul, deterministic=deterministic, pdl=False, beside=beside)
    assert not workspace.expert_counts.any()
    return out


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("name", ROUTINGS)
def test_block(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_module, "RESULT_BYTES", 1)  # as little as possible at a time
    ours, theirs = blocks(name)
    x = noise(tokens, HIDDEN, seed=9)
    want = x.clone()
    TorchBackend(DEVICE, DTYPE).moe(theirs, want)
    assert error(run(ours, x) - x, want - x) < 3 * LIMIT


@pytest.mark.parametrize("late", [False, True])
def test_shared_experts_on_a_second_stream(late: bool) -> None:
    ours, theirs = blocks("shared")
    x = noise(7, HIDDEN, seed=9)
    want = x.clone()
    TorchBackend(DEVICE, DTYPE).moe(theirs, want)
    assert error(run(ours, x, late=late) - x, want - x) < 3 * LIMIT


def test_padding_touches_no_expert() -> None:
    ours, _ = blocks("stored")
    x = noise(6, HIDDEN, seed=9)
    x[4:] = torch.nan
    alone = run(ours, x[:4])

    def valid_of(starts: list[int], contexts: list[int], positions: list[int], blocks: list[int]) -> Tensor:
        def ints(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

        tables = ints(blocks)[:, None].expand(-1, 2).contiguous()
        step = SimpleNamespace(token_ids=x[:, 0], query_starts=ints(starts), context_lens=ints(contexts))
        step.positions, step.block_tables = ints(positions), [tables]
        return mark_valid(step, ints([9] * 40))

    decode = valid_of([0, 1, 2, 3, 4, 5, 6], [5, 1, 9, 3, 0, 0], [4, 0, 8, 2, 0, 0], [3, 4, 5, 6, 0, 0])
    chunks = valid_of([0, 1, 1, 4, 6], [5, 0, 7, 2], [4, 4, 5, 6, 0, 1], [3, 0, 4, 0])  # the last row is padding
    for valid in (decode, chunks):
        assert valid.tolist() == [1, 1, 1, 1, 0, 0]
        got = run(ours, x, valid)
        assert error(got[:4], alone) < LIMIT
        assert got[4:].isnan().all()


def test_deterministic_mode_does_not_depend_on_the_batch() -> None:
    ours, _ = blocks("plain")
    x = noise(7, HIDDEN, seed=9)
    together = run(ours, x, deterministic=True)
    assert torch.equal(run(ours, x[2:4], deterministic=True), together[2:4])


def test_the_workspace_holds_the_largest_of_different_layers() -> None:
    """A checkpoint may have the shared experts of some layers in another format, and so not with the routed ones."""
    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=100)
    layers = [blocks(name)[0] for name in ("plain", "stored")]
    whole = SimpleNamespace(layout=Layout())
    model = SimpleNamespace(config=config, attentions=[], kv_groups=(), feed_forwards=layers, shard=whole)
    assert WorkspaceSizes.of(model, 16, 4, 4).experts == ExpertsShape(EXPERTS + 1, EXPERTS, 3, WIDTH)
