"""An outline has the tensors of the generated checkpoint, one of each kind."""

import numpy as np
import pytest

from emberline.catalog.published_shapes import published_shapes
from emberline.weights.generated import generate_checkpoint
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.outline import OneOfEach, OutlineCheckpoint, first_expert, layer_kinds

MOE = dict(
    model_type="qwen3_moe", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=5, vocab_size=100, num_experts=8,
    num_experts_per_tok=2, max_position_embeddings=4096, mlp_only_layers=[1],
)  # fmt: skip
INT4 = dict(num_bits=4, type="int", symmetric=True, group_size=32, strategy="group")


def compressed(*ignore):
    groups = dict(g=dict(targets=["Linear"], weights=INT4))
    return MOE | dict(
        quantization_config=dict(quant_method="compressed-tensors", config_groups=groups, ignore=[*ignore])
    )


@pytest.mark.parametrize("document", [MOE, compressed("lm_head", "re:.*self_attn.*")])
def test_every_tensor_has_the_shape_and_the_bytes_of_the_generated_one(document):
    outline, made = OutlineCheckpoint(document), generate_checkpoint(document, 0)
    assert {first_expert(name) for name in made.names} == set(outline.names)
    assert outline.config == made.config
    for name in made.names:
        one, other = outline.weight(name), made.weight(name)
        assert (one.shape, one.kind) == (other.shape, other.kind), name
        assert [part.raw.nbytes for part in one.stored] == [part.raw.nbytes for part in other.stored], name
        assert outline.has(name)
    assert not np.any(outline.weight("token_embd.weight").dense())
    assert not outline.has("blk.9.attn_q.weight")


def test_layers_are_alike_by_tensors_format_and_attention():
    assert layer_kinds(OutlineCheckpoint(MOE)) == [0, 1, 0, 0, 0]
    mixed = compressed("lm_head", "model.layers.3.self_attn.q_proj")
    assert layer_kinds(OutlineCheckpoint(mixed)) == layer_kinds(generate_checkpoint(mixed, 0)) == [0, 1, 0, 3, 0]


def test_one_expert_stands_for_all():
    source = OneOfEach(generate_checkpoint(MOE, 0))
    assert source.weight("blk.0.ffn_up_exps.5.weight") is source.weight("blk.0.ffn_up_exps.0.weight")
    assert source.weight("blk.1.ffn_up.weight").name == "blk.1.ffn_up.weight"


def test_published_models_have_few_kinds_of_layers():
    for shape in published_shapes():
        assert len(set(layer_kinds(OutlineCheckpoint(shape.config)))) <= 3, shape.id


def test_a_configuration_that_cannot_be_served_is_refused():
    with pytest.raises(BadCheckpoint, match="awq"):
        OutlineCheckpoint(MOE | dict(quantization_config={"quant_method": "awq"}))
