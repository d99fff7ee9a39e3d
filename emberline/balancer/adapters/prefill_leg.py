"""The rules of every vLLM prefill leg: one token, no stream."""

from typing import Any

from emberline.balancer.adapters.adapter import Fields

_DROPPED = frozenset({"stream_options", "min_tokens"})


def prefill_leg(request: Fields, **added: Any) -> dict[str, Any]:
    """`min_tokens` would contradict the one token; decode still gets it."""
    leg = {name: value for name, value in request.items() if name not in _DROPPED}
    leg |= {"stream": False, "max_tokens": 1}
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = 1
    return leg | added
