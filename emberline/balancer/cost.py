"""What work takes, in seconds: the shape of the cost, whose scale is measured at each endpoint."""

import msgspec


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
