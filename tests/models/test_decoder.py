"""How a decoder is put together from the blocks that an architecture chooses: KV groups, and one layer of each kind."""

import pytest
import torch

from emberline.kernels.backend import MLP, LatentAttention, Layer, MoE
from emberline.kernels.cpu.native_backend import NativeBackend
from emberline.kernels.reference import TorchBackend
from emberline.models.attention import grouped_query_attention, latent_attention
from emberline.models.decoder import Decoder
from emberline.models.feed_forward import mlp, moe
from emberline.models.layer_weights import LayerWeights
from emberline.models.llama import llama
from emberline.weights.model_config import LatentConfig, ModelConfig, MoEConfig
from tests.models.random_checkpoint import RandomCheckpoint
from tests.models.step_inputs import all_logits, pools, step

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "n_layers": 4, "n_heads": 4, "mlp_size": 48, "context_len": 256,
    "norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
LATENT = ModelConfig(
    architecture="deepseek_v3", n_kv_heads=4, head_dim=24, **SIZES,
    latent=LatentConfig(q_lora=24, kv_lora=32, nope=16, rope=8, v_dim=16),
    moe=MoEConfig(layers=(1, 2, 3), experts=8, top_k=2, width=16, shared_width=32, scoring="sigmoid",
                  correction_bias=True),
)  # fmt: skip
CHUNKED = ModelConfig(
    architecture="llama4", n_kv_heads=2, head_dim=8, **SIZES, chunks=(32, 32, 32, None), nope_layers=(3,)
)


def dense_then_experts(layer: LayerWeights) -> Layer:
    return Layer(latent_attention(layer), moe(layer) if layer.number in layer.config.moe.layers else mlp(layer))


def no_rope_in_some_layers(layer: LayerWeights) -> Layer:
    return Layer(grouped_query_attention(layer, rope=layer.number not in layer.config.nope_layers), mlp(layer))


def latent_model() -> Decoder:
    return Decoder(RandomCheckpoint(LATENT), TorchBackend(), dense_then_experts)


def test_latent_attention_has_one_group_of_one_plane() -> None:
    model = latent_model()
    (group,) = model.kv_groups
    assert (group.planes, group.kv_heads, group.head_dim, group.layers) == (1, 1, 40, (0, 1, 2, 3))
    assert group.block_bytes == 4 * 16 * 40 * 4
    assert [attn.layer_index for attn in model.attentions] == [0, 1, 2, 3]


def test_layers_that_keep_the_same_of_a_token_share_a_group_and_full_attention_is_first() -> None:
    model = Decoder(RandomCheckpoint(CHUNKED), TorchBackend(), no_rope_in_some_layers)
    full, chunked = model.kv_groups
    assert (full.name, full.layers, full.window) == ("full", (3,), None)
    assert (chunked.name, chunked.layers, chunked.window, chunked.chunked) == ("chunk32", (0, 1, 2), 32, True)
    assert [(attn.kv_group, attn.layer_index) for attn in model.attentions] == [(1, 0), (1, 1), (1, 2), (0, 0)]
    assert len({group.tag for group in model.kv_groups}) == 2


def test_one_layer_of_each_kind() -> None:
    model = latent_model()
    layers = model.layers
    with model.distinct_layers():
        kinds = [(type(layer.attention), type(layer.feed_forward)) for layer in model.layers]
    assert kinds == [(LatentAttention, MLP), (LatentAttention, MoE)]
    assert model.layers is layers


def test_matrices_are_those_of_every_block() -> None:
    model = latent_model()
    attention, dense, experts = 3, 2, 4
    assert len(model.matrices) == 2 + 4 * attention + dense + 3 * experts


def test_chunks_of_a_prompt_compute_what_the_whole_prompt_does() -> None:
    ids = list(range(3, 60))
    for model in (latent_model(), Decoder(RandomCheckpoint(CHUNKED), TorchBackend(), no_rope_in_some_layers)):
        want, kv, parts = all_logits(model, ids), pools(model, 5), []
        for start, stop in ((0, 20), (20, 21), (21, 57)):
            inputs = step([(ids[start:stop], start)], torch.tensor([[3, 0, 4, 1]]), len(model.kv_groups))
            parts.append(model.forward(inputs, kv))
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", [TorchBackend, NativeBackend], ids=["torch", "native"])
def test_hidden_states_are_tapped_where_a_shorter_model_ends(backend) -> None:
    config = ModelConfig(
        architecture="llama", vocab_size=61, hidden_size=32, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=16,
        mlp_size=48, context_len=64, norm_eps=1e-5, rope_theta=10000.0,
    )  # fmt: skip
    model = Decoder(RandomCheckpoint(config), backend(), llama)
    inputs = step([([5, 6, 7, 8], 0)], torch.tensor([[1]]), 1)
    want = model.forward(inputs, pools(model, 2))
    taps = (0, 1, 3, 4)
    for _ in range(2):
        got, hidden = model.forward_tapped(inputs, pools(model, 2), taps)
        assert torch.equal(got, want)
        assert len(hidden) == len(taps)
    layers = model.layers
    for tap, states in zip(taps, hidden):
        model.layers = layers[:tap]
        assert torch.equal(model._run_layers(inputs, pools(model, 2)), states)
