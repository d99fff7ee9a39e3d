"""The cost model: seconds of prefill and decode work. Its proportions are fixed, its scale is measured per worker."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from emberline.protocol.block_hash import BLOCK_TOKENS


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill is linear in new tokens and, through attention, in new tokens times context; a decode step is linear in
    sequences and in their contexts. The figures are those published for an 8B model on one GPU. Only their proportions
    matter: the speed of each worker is measured from its first tokens."""

    request_s: float = 0.066  # of every prompt, however short
    token_s: float = 57e-6  # of a new prompt token
    attention_s: float = 8.82e-9  # of a new prompt token, for each token before it
    step_s: float = 0.01064  # of a decode step
    stream_s: float = 419e-6  # of a sequence in it
    context_s: float = 1.42e-7  # of a token of context in it
    transfer_s: float = 2e-6  # of a token's KV from prefill to decode

    def prefill_s(self, uncached: int, total: int) -> float:
        """Estimate the prefill time, on an otherwise idle worker, of a prompt whose last `uncached` tokens of `total`
        are computed."""
        return self.request_s + self.work_s(uncached, total)

    def work_s(self, uncached: int, total: int) -> float:
        """By which the prompt delays those behind it: without the fixed cost, which prompts of one step share."""
        return uncached * (self.token_s + self.attention_s * (total - uncached / 2))

    def decode_step_s(self, streams: int, context_tokens: int) -> float:
        return self.step_s + self.stream_s * streams + self.context_s * context_tokens


KEEP = 0.95  # weight of the past at each sample,
FADE = 0.9  # and at each health check of a worker that was not measured recently
PRIOR_S = 0.05  # seconds of predicted work that the prior weighs
MIN_SCALE, MAX_SCALE = 1e-4, 1e4


@dataclass(slots=True, eq=False)
class SpeedEstimate:
    """Measured over predicted seconds. A ratio of sums, not a mean of ratios: prompts computed in one batch end
    together, and then the time of all must be compared with the work of all."""

    scale: float = 1.0
    n: int = 0  # samples
    _prior: float = 1.0
    _took_s: float = 0.0
    _predicted_s: float = 0.0

    def add(self, took_s: float, predicted_s: float) -> None:
        if took_s < 0 or predicted_s <= 0:
            return
        self.n += 1
        self._took_s = KEEP * self._took_s + took_s
        self._predicted_s = KEEP * self._predicted_s + predicted_s
        self._update()

    def fade(self, prior: float) -> None:
        """Forget old measurements: one slow start must not keep requests away for ever."""
        self._prior = prior
        self._took_s *= FADE
        self._predicted_s *= FADE
        self._update()

    def _update(self) -> None:
        scale = (self._took_s + PRIOR_S * self._prior) / (self._predicted_s + PRIOR_S)
        self.scale = min(MAX_SCALE, max(MIN_SCALE, scale))


PolicyName = Literal["sticky", "affinity", "prefix", "round_robin", "least_loaded"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    policy: PolicyName = "sticky"
    others: float = 2.0  # weight of what a prefill costs the other conversations of the worker: higher is stickier
    ahead_s: float = 0.5  # prefill work queued in a worker beyond which requests wait in the admission queue
    local_tokens: int = 256  # uncached tokens that a decode worker computes itself
    max_waiting: int = 256  # length of the admission queue per worker of the model
    block_tokens: int = BLOCK_TOKENS  # per content key
    region: str = ""  # of this core; empty: it prefers none
    index_bytes: int = 512 << 20  # of the fleet's prefix index
    cost: Cost = Cost()


DEFAULTS = Settings()
