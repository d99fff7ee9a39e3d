"""The prompt as its client wants to have it back: text, token ids, and log-probabilities that an engine tells."""

import asyncio

from emberline.protocol.errors import Internal
from emberline.protocol.events import PromptLogprobs, PromptTokens, TokenDelta
from emberline.protocol.token_ids import unpack
from emberline.service.prepare import Prepared

OFF_LOOP_TOKENS = 4096  # of a prompt and alternatives, from which on they are spelled in a thread


class PromptReport:
    """Collects the log-probabilities of a prompt, which come before the first token."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._parts: list[PromptLogprobs] = []

    def restart(self) -> None:
        """Forget what an attempt has told that was lost."""
        self._parts.clear()

    def take(self, delta: TokenDelta) -> None:
        """Take in what a delta tells."""
        if delta.prompt_logprobs is not None:
            self._parts.append(delta.prompt_logprobs)

    async def told(self) -> PromptTokens:
        """The prompt, once all of it is computed. Raises Internal if the engine has left log-probabilities out."""
        n_tokens, wanted = self._prepared.prompt.n_ids, self._prepared.sampling.prompt_logprobs
        logprobs = PromptLogprobs.joined(self._parts) if self._parts else None
        n_told = 0 if logprobs is None else len(logprobs.logprobs) // 4
        if wanted is not None and n_told != n_tokens - 1:
            raise Internal(f"the engine told {n_told} of {n_tokens - 1} log-probabilities of the prompt")
        if n_tokens * (2 + (wanted or 0)) > OFF_LOOP_TOKENS:
            return await asyncio.to_thread(self._spelled, logprobs)
        return self._spelled(logprobs)

    def _spelled(self, logprobs: PromptLogprobs | None) -> PromptTokens:
        prepared, request = self._prepared, self._prepared.request
        text, ids = prepared.served.text, prepared.prompt.ids
        told = PromptTokens(ids, "" if request.prompt is None else request.prompt, logprobs)
        if request.echo and request.prompt is None:
            told.text = text.decode(ids, special=True)
        if prepared.sampling.prompt_logprobs is not None:
            known = {*unpack(ids), *unpack(b"" if logprobs is None else logprobs.top_ids)}
            told.spelled = {token_id: text.token_text(token_id).decode("utf-8", "replace") for token_id in known}
        return told
