"""The balancer's few knobs."""

from typing import Literal

import msgspec

from emberline.balancer.cost import Cost
from emberline.protocol.layout import BLOCK_TOKENS

PolicyName = Literal["sticky", "affinity", "prefix", "round_robin", "least_loaded"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    policy: PolicyName = "sticky"
    others: float = 2.0  # weight of what computing a prompt costs those who live at the endpoint; stickiness
    ahead_s: float = 0.5  # prefill work that an endpoint has before it, beyond which requests are held back
    local_tokens: int = 256  # uncached tokens that a decode endpoint computes itself
    max_waiting: int = 256  # requests held back per endpoint of the model
    block_tokens: int = BLOCK_TOKENS  # that a content key stands for
    index_bytes: int = 512 << 20  # of the fleet-wide prefix index
    cost: Cost = Cost()


DEFAULTS = Settings()
