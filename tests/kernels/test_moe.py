"""Routing and experts in plain PyTorch, against the formulas spelled out token by token."""

import pytest
import torch

from emberline.kernels.moe import TorchExperts, gated_activation, route, run_experts
from emberline.kernels.routing import Routing, check_routing


def test_sigmoid_scores_choose_with_the_correction_and_weigh_without_it() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    correction = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = route(logits, Routing(2, "sigmoid", normalize=True, scale=2.5), correction)
    assert ids.tolist() == [[3, 0]]
    scores = torch.sigmoid(torch.tensor([-1.0, 2.0]))
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.5)


def test_softmax_is_over_all_experts_and_normalized_only_if_asked() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    ids, weights = route(logits, Routing(2, normalize=False))
    assert ids.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], logits.softmax(-1)[0, [1, 2]])
    normalized = route(logits, Routing(2))[1]
    torch.testing.assert_close(normalized[0], torch.tensor([3.0, 1.0]).softmax(-1))  # as GPT-OSS: of the chosen alone


def test_only_the_best_groups_are_considered() -> None:
    # Group scores, sums of the two best: 6, 7, 4. The single best expert, of group 2, is not in the best group.
    logits = torch.tensor([[3.0, 3.0, 0.0, 0.0, 3.5, 3.5, 0.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    routing = Routing(2, "sigmoid", n_groups=4, top_groups=1)
    assert route(logits, routing)[0].tolist() == [[4, 5]]
    assert route(logits, Routing(2, "sigmoid"))[0].tolist() == [[8, 4]]


def test_padding_gets_no_expert_and_shared_experts_every_token() -> None:
    logits = torch.zeros(2, 4)
    ids, weights = route(logits, Routing(2, n_shared=1, scale=3.0), valid=torch.tensor([1, 0]))
    assert ids.tolist() == [[0, 1, 4], [-1, -1, -1]]
    assert weights.tolist() == [[1.5, 1.5, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_clamped"])
def test_experts(activation: str, on_input: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 8, generator=generator)
    gate_up = TorchExperts(torch.randn(4, 12, 8, generator=generator), torch.randn(4, 12, generator=generator))
    down = TorchExperts(torch.randn(4, 8, 6, generator=generator), torch.randn(4, 8, generator=generator))
    ids, weights = torch.tensor([[0, 3], [3, 1], [-1, -1]]), torch.rand(3, 2, generator=generator)
    got = run_experts(x, ids, weights, gate_up, down, activation, on_input)
    assert gate_up.bias is not None
    assert down.bias is not None
    for token in range(3):
        want = torch.zeros(8)
        for e, w in zip(ids[token].tolist(), weights[token], strict=True):
            if e >= 0:
                both = gate_up.weight[e] @ (x[token] * w if on_input else x[token]) + gate_up.bias[e]
                result = down.weight[e] @ gated_activation(activation, both[:6], both[6:]) + down.bias[e]
                want += result if on_input else result * w
        torch.testing.assert_close(got[token], want)


def test_clamped_swiglu() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0]), torch.tensor([9.0, -9.0, 2.0])
    want = torch.tensor([7 * torch.sigmoid(torch.tensor(1.702 * 7)) * 8, 0.0, torch.sigmoid(torch.tensor(1.702)) * 3])
    got = gated_activation("swiglu_clamped", gate, up)
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]])
    torch.testing.assert_close(got[1], -9 * torch.sigmoid(torch.tensor(-9 * 1.702)) * -6)  # the gate has no lower limit


@pytest.mark.parametrize(
    ("routing", "n_experts", "message"),
    [
        (Routing(2), 513, "at most 512"),
        (Routing(17), 64, "1 to 16"),
        (Routing(5), 4, "1 to 4"),
        (Routing(2, "tanh"), 4, "softmax, sigmoid"),
        (Routing(2, n_groups=3), 8, "do not divide"),
        (Routing(4, n_groups=4, top_groups=1), 8, "do not hold"),
        (Routing(2, n_groups=2, top_groups=1), 12, "power of two"),
    ],
)
def test_impossible_routing_is_refused(routing: Routing, n_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_routing(routing, n_experts)
