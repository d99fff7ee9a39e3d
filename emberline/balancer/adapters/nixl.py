"""vLLM with NIXL, pulled: prefill's answer says where the blocks lie, decode fetches them."""

from typing import Any

from emberline.balancer.adapters.adapter import BadAnswer, Fetch, Fields, Peer, Plan
from emberline.balancer.adapters.prefill_leg import prefill_leg

_KEEP_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlPull:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        return Plan(prefill_leg(request, kv_transfer_params=_KEEP_BLOCKS), request, "serial")

    def after_prefill(self, answer: Any) -> Fields:
        """Verbatim: what is in it is between the two servers, and differs from version to version."""
        params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if params is None:
            raise BadAnswer("its answer has no kv_transfer_params: is it started with a kv_connector?")
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            raise BadAnswer("its kv_transfer_params do not tell decode to fetch anything")
        return {"kv_transfer_params": params}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        return None
