"""Feed-forward blocks, built from a layer's weights and the model's configuration."""

from emberline.kernels.backend import MLP, MoE
from emberline.kernels.routing import MAX_EXPERTS, Routing, check_routing
from emberline.models.layer_weights import LayerWeights
from emberline.weights.model_config import BadCheckpoint


def feed_forward(layer: LayerWeights) -> MLP | MoE:
    """Experts in the layers that the configuration says, an MLP in the others."""
    return moe(layer) if layer.number in layer.config.moe_layers else mlp(layer)


def mlp(layer: LayerWeights, *, post_norm: str | None = None) -> MLP:
    config = layer.config
    return MLP(
        norm=layer.norm("ffn_norm"),
        gate_up=layer.matrix("ffn_gate", "ffn_up", gated=True),
        down=layer.matrix("ffn_down"),
        post_norm=None if post_norm is None else layer.norm(post_norm),
        eps=config.norm_eps,
        activation=config.activation,
    )


def moe(layer: LayerWeights) -> MoE:
    """Experts, and the shared ones where the configuration gives them a width.

    A shared expert like the routed ones is stored with them and computed in the same launches; else it is an MLP.
    """
    config, moe = layer.config, layer.config.moe
    router = layer.tensor("ffn_gate_inp")
    all_here = len(router) == moe.experts  # a rank may have some of the experts
    stored = moe.shared_width == moe.width and moe.experts < MAX_EXPERTS and all_here
    stored = stored and all(
        layer.same_format(f"ffn_{part}_shexp", f"ffn_{part}_exps.0") for part in ("gate", "up", "down")
    )
    routing = Routing(moe.top_k, moe.scoring, moe.n_groups, moe.top_groups, moe.normalize, moe.scale, int(stored))
    try:
        check_routing(routing, len(router))
    except ValueError as error:
        raise BadCheckpoint(str(error)) from None
    norm, shared = layer.norm("ffn_norm"), None
    if moe.shared_width and not stored:
        shared = MLP(
            norm=norm,
            gate_up=layer.matrix("ffn_gate_shexp", "ffn_up_shexp", gated=True),
            down=layer.matrix("ffn_down_shexp"),
            eps=config.norm_eps,
            activation=config.activation,
        )
    return MoE(
        norm=norm,
        router=router,
        router_bias=layer.vector("ffn_gate_inp", "bias") if moe.biases else None,
        routing=routing,
        correction_bias=layer.vector("exp_probs_b", "bias") if moe.correction_bias else None,
        gate_up=layer.experts(
            "ffn_gate_exps",
            "ffn_up_exps",
            n=moe.experts,
            bias=moe.biases,
            gated=True,
            shared=("ffn_gate_shexp", "ffn_up_shexp") if stored else (),
        ),
        down=layer.experts(
            "ffn_down_exps", n=moe.experts, bias=moe.biases, shared=("ffn_down_shexp",) if stored else ()
        ),
        shared=shared,
        eps=config.norm_eps,
        first_expert=moe.first_expert,
        weight_on_input=moe.weight_on_input,
        activation=moe.activation,
    )
