"""Routing and token permutation on the device, against plain PyTorch; each pair is in one block of its expert."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from emberline.kernels.gpu.moe_routing import (
    Permutation,
    make_permutation,
    max_blocks,
    permutation_ints,
    route_tokens,
)
from emberline.kernels.moe import route
from emberline.kernels.routing import Routing
from tests.examples import n_examples
from tests.kernels.gpu.batches import DEVICE


def permuted(
    logits: torch.Tensor, routing: Routing, block: int = 16, first: int = 0, n_local: int | None = None, **more: object
) -> Permutation:
    tokens, experts = logits.shape
    n_local = experts + routing.n_shared if n_local is None else n_local
    memory = torch.full((permutation_ints(tokens, routing.slots, n_local),), -7, dtype=torch.int32, device=DEVICE)
    to = make_permutation(memory, tokens, routing.slots, n_local, block)
    counts = torch.zeros(n_local + 1, dtype=torch.int32, device=DEVICE)
    route_tokens(logits, routing, to, counts, first_expert=first, **more)  # type: ignore[arg-type]
    assert not counts.any()
    return to


def pairs_by_expert(to: Permutation) -> dict[int, list[int]]:
    """From the blocks, as the grouped GEMM reads them."""
    n = int(to.n_blocks)
    assert n <= to.max_blocks
    found: dict[int, list[int]] = {}
    for expert, first, count, _ in to.blocks[:n].tolist():
        assert 1 <= count <= to.block_tokens
        found.setdefault(expert, []).extend(to.lists[expert, first : first + count].tolist())
    return found


def assert_consistent(to: Permutation) -> None:
    want: dict[int, list[int]] = {}
    for pair, expert in enumerate(to.ids.flatten().tolist()):
        if expert >= 0:
            want.setdefault(expert, []).append(pair)
    assert {e: sorted(pairs) for e, pairs in pairs_by_expert(to).items()} == want


ROUTINGS = {
    "softmax": (Routing(4), 32),
    "unnormalized": (Routing(8, normalize=False), 128),
    "kimi": (Routing(8, "sigmoid", scale=2.827), 384),
    "deepseek": (Routing(8, "sigmoid", n_groups=8, top_groups=4, scale=2.5), 256),
    "llama4": (Routing(1, "sigmoid", normalize=False), 16),
    "shared": (Routing(4, "sigmoid", scale=1.8, n_shared=1), 64),
    "largest": (Routing(16, n_shared=1), 511),
    "odd": (Routing(3), 5),
}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_routing(name: str, corrected: bool) -> None:
    routing, experts = ROUTINGS[name]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, experts, generator=generator).to(DEVICE)
    correction = (torch.randn(experts, generator=generator) * 0.3).to(DEVICE) if corrected else None
    to = permuted(logits, routing, correction=correction)
    ids, weights = route(logits, routing, correction)
    assert torch.equal(to.ids, ids)
    torch.testing.assert_close(to.weights, weights)
    assert_consistent(to)


def test_equal_scores_choose_the_first_experts() -> None:
    routing = Routing(4, n_groups=4, top_groups=2)
    to = permuted(torch.zeros(2, 16, device=DEVICE), routing)
    assert to.ids.tolist() == [[0, 1, 2, 3]] * 2


def test_nan_logits_stay_within_their_token() -> None:
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    want = route(logits, Routing(2))
    logits[1] = torch.nan
    to = permuted(logits, Routing(2))
    assert torch.equal(to.ids[[0, 2]], want[0][[0, 2]])
    torch.testing.assert_close(to.weights[[0, 2]], want[1][[0, 2]])
    assert ((to.ids >= 0) & (to.ids < 16)).all()
    assert_consistent(to)


@settings(max_examples=n_examples(15))
@given(st.data())
def test_each_pair_is_in_one_block_and_padding_in_none(data: st.DataObject) -> None:
    tokens, experts = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 12))
    top_k, shared = data.draw(st.integers(1, min(experts, 6))), data.draw(st.integers(0, 1))
    routing = Routing(top_k, n_shared=shared)
    valid = torch.tensor(data.draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens)), dtype=torch.int32)
    # Few distinct logits, so that tokens crowd into the same experts and fill several blocks.
    values = data.draw(st.lists(st.integers(0, 3), min_size=tokens * experts, max_size=tokens * experts))
    logits = torch.tensor(values, dtype=torch.float32).view(tokens, experts).to(DEVICE)
    to = permuted(logits, routing, data.draw(st.sampled_from([8, 16])), valid=valid.to(DEVICE))
    assert_consistent(to)
    found = Counter(pair for pairs in pairs_by_expert(to).values() for pair in pairs)
    slots = routing.slots
    assert found == Counter(t * slots + s for t in range(tokens) for s in range(slots) if valid[t])
    assert torch.equal(to.ids.cpu(), route(logits.cpu(), routing, valid=valid)[0])


def test_ranks_divide_the_experts() -> None:
    logits = torch.randn(9, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    want, weights = route(logits, Routing(4))
    for first, n_local in ((0, 20), (20, 12)):
        to = permuted(logits, Routing(4), first=first, n_local=n_local)
        mine = (want >= first) & (want < first + n_local)
        assert torch.equal(to.ids, torch.where(mine, want - first, -1))
        torch.testing.assert_close(to.weights, weights * mine)
        assert_consistent(to)


@given(st.integers(1, 600), st.integers(1, 9), st.integers(1, 400), st.sampled_from([8, 16, 64]))
def test_bound_of_blocks(tokens: int, slots: int, experts: int, block: int) -> None:
    slots = min(slots, experts)
    bound = max_blocks(tokens, slots, experts, block)
    # Chosen to need many blocks: as many experts as possible touched once, the rest of the pairs on the first.
    counts, left = [0] * experts, tokens * slots
    for e in range(experts):
        counts[e] += min(1, left)
        left -= min(1, left)
    for e in range(experts):
        more = min(left, tokens - counts[e])
        counts[e] += more
        left -= more
    assert sum(-(-c // block) for c in counts) <= bound
    assert bound <= tokens * slots


@given(st.integers(1, 600), st.integers(1, 9), st.integers(9, 400), st.sampled_from([8, 16, 64]))
def test_tensors_of_a_permutation_are_aligned(tokens: int, slots: int, experts: int, block: int) -> None:
    """Triton compiles kernels again, while a request waits, for a pointer that is not."""
    memory = torch.zeros(permutation_ints(tokens, slots, experts), dtype=torch.int32)
    to = make_permutation(memory, tokens, slots, experts, block)
    for tensor in (to.ids, to.weights, to.lists, to.blocks, to.n_blocks):
        assert (tensor.data_ptr() - memory.data_ptr()) % 16 == 0
