"""vLLM with Mooncake: both legs at once, joined by an id and what prefill's bootstrap server says of itself."""

import secrets
from typing import Any

from emberline.balancer.adapters.adapter import BadAnswer, Fetch, Fields, Peer, Plan
from emberline.balancer.adapters.prefill_leg import prefill_leg


class Mooncake:
    cached_from_prefill = True
    decodes_alone = True

    def prepare(self, request: Fields, prefill: Peer, decode: Peer) -> Plan:
        transfer = f"xfer-{secrets.token_hex(16)}"
        produced = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        fetched = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_bootstrap_addr": f"http://{prefill.bootstrap}",
            "remote_engine_id": prefill.facts["engine_id"],
            "transfer_id": transfer,
        }
        return Plan(
            prefill_leg(request, kv_transfer_params=produced), {**request, "kv_transfer_params": fetched}, "concurrent"
        )

    def after_prefill(self, answer: Any) -> Fields:
        return {}

    async def learn(self, prefill: Peer, fetch: Fetch) -> None:
        if "engine_id" in prefill.facts:
            return
        answer = await fetch(prefill.bootstrap, "/query")
        rank = answer.get("0") if isinstance(answer, dict) else None
        engine_id = rank.get("engine_id") if isinstance(rank, dict) else None
        if not isinstance(engine_id, str) or not engine_id:
            raise BadAnswer(f"its bootstrap server {prefill.bootstrap} names no engine id")
        prefill.facts["engine_id"] = engine_id
