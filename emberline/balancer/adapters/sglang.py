"""SGLang: the same body to both at once, with the room where they meet."""

import secrets
from typing import Any

from emberline.balancer.adapters.adapter import Fetch, Fields, Peer, Plan

ROOMS = 1 << 63


class SGLang:
    cached_from_prefill = False  # decode reports it
    decodes_alone = False  # it refuses requests without a room

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        host, _, port = prefill.bootstrap.rpartition(":")
        n = _sequences(request)
        if n == 1:
            meeting: dict[str, Any] = {
                "bootstrap_host": host,
                "bootstrap_port": int(port),
                "bootstrap_room": secrets.randbelow(ROOMS),
            }
        else:
            meeting = {
                "bootstrap_host": [host] * n,
                "bootstrap_port": [int(port)] * n,
                "bootstrap_room": [secrets.randbelow(ROOMS) for _ in range(n)],
            }
        body = {**request, **meeting}
        return Plan(body, body, "concurrent")

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None


def _sequences(request: Fields) -> int:
    """How many rooms: one per choice of every prompt."""
    prompts = request.get("prompt")
    return (request.get("n") or 1) * (len(prompts) if isinstance(prompts, list) else 1)
