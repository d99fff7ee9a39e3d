"""The limits of one engine, and the validation of requests against them."""

import math
from dataclasses import dataclass

import numpy as np

from emberline.protocol.block_hash import BLOCK_TOKENS, DIGEST_BYTES
from emberline.protocol.errors import BadInput, ContextExceeded
from emberline.protocol.request import MAX_DRAFT_TOKENS, EngineRequest, SamplingParams, ThinkingLimit

MAX_LOGPROBS = 20  # alternatives of each token
MAX_BAD_WORDS = 512  # in all their spellings; with biases and stop tokens they fit into a GPU sampler's table


@dataclass(slots=True, frozen=True)
class WorkLimits:
    """Bounds of the scheduler's own work per step, and of its patience, in steps."""

    keys_at_once: int = 16  # blocks that are hashed ahead of a cache lookup
    look_ups: int = 1024  # blocks of waiting sequences looked up in a step that others decode in: about 0.2 ms
    decisions: int = 8  # waiting sequences for which a step asks the tiers
    burst_steps: int = 128  # steps of a burst of prompts; then decoding sequences are protected from further prompts
    burst_gap: int = 8  # steps without prompts inside a burst
    paused_steps: int = 16  # consecutive steps in which batch-class sequences yield to prompts of better classes
    starved_steps: int = 1000  # steps that a batch-class sequence waits before it is ranked with the default class
    ended_requests: int = 1024  # ended requests whose client may still report tool calls


@dataclass(slots=True, frozen=True)
class Limits:
    context_len: int  # maximum tokens of a sequence, prompt and reply; no more than the KV pool holds
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_running: int
    token_budget: int  # maximum tokens computed in a step
    work: WorkLimits = WorkLimits()

    def __post_init__(self) -> None:
        assert 1 <= self.max_running <= self.token_budget, "every running sequence must get one token per step"

    def check(self, request: EngineRequest) -> None:
        """Raise BadInput or ContextExceeded for a request that could not run to its end."""
        n_prompt, ragged = divmod(len(request.prompt_ids), 4)
        if ragged or not n_prompt:
            raise BadInput("the prompt must be at least one token id of 4 bytes", param="prompt")
        if n_prompt >= self.context_len:
            raise ContextExceeded(
                f"the prompt has {n_prompt} tokens; prompt and reply together may have {self.context_len} here",
                param="prompt",
            )
        if (largest := int(np.frombuffer(request.prompt_ids, "<u4").max())) >= self.vocab_size:
            raise BadInput(f"token id {largest} is not in the vocabulary of {self.vocab_size}", param="prompt")
        self._check_sampling(request.sampling)
        most = request.speculation.max_draft_tokens
        if most is not None and not 0 <= most <= MAX_DRAFT_TOKENS:
            raise BadInput(
                f"max_draft_tokens must be between 0 and {MAX_DRAFT_TOKENS}, not {most}", param="speculation"
            )
        self._check_resumed(request)
        if request.keys and len(request.keys) != n_prompt // BLOCK_TOKENS * DIGEST_BYTES:
            raise BadInput(
                f"a prompt of {n_prompt} tokens has {n_prompt // BLOCK_TOKENS} block keys of {DIGEST_BYTES} bytes,"
                f" not {len(request.keys)} bytes of keys",
                param="keys",
            )
        if (limit := request.thinking_limit) is not None:
            self._check_thinking(limit)

    def max_output(self, request: EngineRequest) -> int:
        """Maximum tokens of the reply, resumed ones included."""
        room = self.context_len - len(request.prompt_ids) // 4
        max_tokens = request.sampling.max_tokens
        return room if max_tokens is None else min(room, max_tokens)

    def _check_resumed(self, request: EngineRequest) -> None:
        n_resumed, ragged = divmod(len(request.output_ids), 4)
        if not n_resumed and not ragged:
            return
        if ragged:
            raise BadInput("the output to resume must be whole token ids of 4 bytes", param="output_ids")
        if (largest := int(np.frombuffer(request.output_ids, "<u4").max())) >= self.vocab_size:
            raise BadInput(f"token id {largest} is not in the vocabulary of {self.vocab_size}", param="output_ids")
        if n_resumed >= self.max_output(request):
            raise BadInput(f"a reply of {n_resumed} tokens has no room left to resume", param="output_ids")

    def _check_thinking(self, limit: ThinkingLimit) -> None:
        if limit.most < 0 or not limit.ids or len(limit.ids) % 4:
            raise BadInput(
                "a thinking limit needs a number of tokens and the token ids that end the thinking",
                param="thinking_limit",
            )
        if int(np.frombuffer(limit.ids, "<u4").max()) >= self.vocab_size:
            raise BadInput("a thinking limit has token ids outside the vocabulary", param="thinking_limit")

    def _check_sampling(self, sampling: SamplingParams) -> None:
        for name, low, high in _RANGES:
            value = getattr(sampling, name)
            if value is not None and not low <= value <= high:  # false for NaN too
                raise BadInput(f"{name} must be between {low:g} and {high:g}, not {value}", param=name)
        for param, token_ids in (
            ("stop_ids", sampling.stop_ids),
            ("logit_bias", sampling.logit_bias),
            ("allowed_ids", sampling.allowed_ids),
        ):
            for token_id in token_ids:
                if not 0 <= token_id < self.vocab_size:
                    raise BadInput(f"token id {token_id} is not in the vocabulary of {self.vocab_size}", param=param)
        if not all(word and len(word) % 4 == 0 for word in sampling.bad_ids):
            raise BadInput("a bad word needs at least one token id", param="bad_ids")
        if sampling.bad_ids and int(np.frombuffer(b"".join(sampling.bad_ids), "<u4").max()) >= self.vocab_size:
            raise BadInput("a bad word has token ids outside the vocabulary", param="bad_ids")
        if len(sampling.bad_ids) > MAX_BAD_WORDS:
            raise BadInput(f"there are {len(sampling.bad_ids)} bad words, and at most {MAX_BAD_WORDS}", param="bad_ids")
        if not all(map(math.isfinite, sampling.logit_bias.values())):
            raise BadInput("a logit bias must be a finite number", param="logit_bias")


# Wider than what the HTTP APIs allow: here only what would break the sampler is refused.
_RANGES = (
    ("max_tokens", 0, math.inf),
    ("min_tokens", 0, math.inf),
    ("temperature", 0, 1e6),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-6, 1e6),
    ("frequency_penalty", -1e6, 1e6),
    ("presence_penalty", -1e6, 1e6),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
