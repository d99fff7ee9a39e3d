"""What work takes, in seconds: the shape of the cost, whose scale is measured at each endpoint."""

from typing import Literal

import msgspec

from emberline.protocol.block_hash import BLOCK_TOKENS


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill is linear in new tokens and, through attention, in new tokens times context; a decode step is linear in
    streams and in their contexts. The figures are those published for an 8B model on one GPU; they matter by their
    proportions, since each endpoint's own pace is learnt from its first tokens."""

    request_s: float = 0.066  # of every prompt, however short
    token_s: float = 57e-6  # of a new token
    attention_s: float = 8.82e-9  # of a new token for each token before it
    step_s: float = 0.01064  # of a decode step
    stream_s: float = 419e-6  # of a stream in it
    context_s: float = 1.42e-7  # of a token of context in it
    transfer_s: float = 2e-6  # of a token's KV from prefill to decode

    def prefill_s(self, uncached: int, total: int) -> float:
        """Of a prompt of `total` tokens, the last `uncached` of which are computed, by itself."""
        return self.request_s + self.work_s(uncached, total)

    def work_s(self, uncached: int, total: int) -> float:
        """By which it holds up others; what every prompt takes anyhow they take together."""
        return uncached * (self.token_s + self.attention_s * (total - uncached / 2))

    def decode_step_s(self, streams: int, context_tokens: int) -> float:
        return self.step_s + self.stream_s * streams + self.context_s * context_tokens


KEEP = 0.95  # of the past, at each sample,
FADE = 0.9  # and at each look at an endpoint that has shown nothing of late
PRIOR_S = 0.05  # of predicted work that the first guess weighs
SLOWEST, FASTEST = 1e4, 1e-4  # no measurement is believed beyond


class SpeedEstimate:
    """A ratio of sums, not a mean of ratios: prompts that are computed side by side end together, and the time of all
    then stands beside the work of all."""

    __slots__ = ("_guess", "_predicted_s", "_took_s", "n", "scale")

    def __init__(self, guess: float = 1.0) -> None:
        self.scale: float = guess
        self.n = 0
        self._guess = guess
        self._took_s = 0.0
        self._predicted_s = 0.0

    def add(self, took_s: float, predicted_s: float) -> None:
        if took_s < 0 or predicted_s <= 0:
            return
        self.n += 1
        self._took_s = KEEP * self._took_s + took_s
        self._predicted_s = KEEP * self._predicted_s + predicted_s
        self._settle()

    def relax(self, guess: float) -> None:
        """Let go of what was measured long ago: one slow beginning must not keep requests away for ever."""
        self._guess = guess
        self._took_s *= FADE
        self._predicted_s *= FADE
        self._settle()

    def _settle(self) -> None:
        scale = (self._took_s + PRIOR_S * self._guess) / (self._predicted_s + PRIOR_S)
        self.scale = min(SLOWEST, max(FASTEST, scale))


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
