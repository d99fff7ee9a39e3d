"""A shared store (LMCache, Mooncake Store): blocks are found by their content, so decode needs to be told nothing."""

from typing import Any

from emberline.balancer.adapters.adapter import Fetch, Fields, Peer, Plan
from emberline.balancer.adapters.prefill_leg import prefill_leg


class SharedStore:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        return Plan(prefill_leg(request), request, "serial")

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None
