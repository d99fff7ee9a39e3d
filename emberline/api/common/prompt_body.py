"""Token-level parts of OpenAI's replies, as vLLM extends them: log-probabilities of a prompt, ids of its tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from emberline.api.common.response_body import MIN_LOGPROB
from emberline.protocol.events import PromptTokens, TextLogprob
from emberline.protocol.token_ids import unpack


class TokenTexts(NamedTuple):
    """Tokens as a text completion's `logprobs` lists them, one entry of each list per token."""

    tokens: list[str]
    logprobs: list[float | None]
    top: list[dict[str, float] | None]

    def followed_by(self, others: "TokenTexts") -> "TokenTexts":
        """Tokens of both, one after the other."""
        return TokenTexts(self.tokens + others.tokens, self.logprobs + others.logprobs, self.top + others.top)

    def body(self, offset: int) -> dict[str, Any]:
        """The `logprobs` object. `offset`: where the text of the first token begins, in characters of the answer."""
        offsets: list[int] = []
        for token in self.tokens:
            offsets.append(max(0, offset))  # a token that the tokenizer has put before the text has no place in it
            offset += len(token)
        return {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top,
            "text_offset": offsets,
        }


def reply_tokens(tokens: Sequence[TextLogprob]) -> TokenTexts:
    """Tokens of a reply. Alternatives always include the sampled token."""
    return TokenTexts(
        [token.token for token in tokens],
        [_finite(token.logprob) for token in tokens],
        [{other.token: _finite(other.logprob) for other in (*token.top, token)} for token in tokens],
    )


def prompt_tokens(prompt: PromptTokens, n_top: int) -> TokenTexts:
    """Tokens of a prompt with their n_top most likely alternatives. No probability is known of the first token."""
    spelled, ids = prompt.spelled, unpack(prompt.ids)
    found = TokenTexts([spelled[token_id] for token_id in ids], [None], [None])
    for token_id, (logprob, _, top) in zip(ids[1:], prompt.logprobs.rows() if prompt.logprobs is not None else ()):
        found.logprobs.append(_finite(logprob))
        named = {spelled[other]: _finite(value) for other, value in top[:n_top]}
        named[spelled[token_id]] = _finite(logprob)
        found.top.append(named)
    return found


def prompt_logprobs_body(prompt: PromptTokens, n_top: int) -> list[dict[str, Any] | None]:
    """`prompt_logprobs`: null for the first token; for each of the others, by token id, itself and its alternatives."""
    spelled, body = prompt.spelled, list[dict[str, Any] | None]([None])
    for token_id, (logprob, rank, top) in zip(
        unpack(prompt.ids)[1:], prompt.logprobs.rows() if prompt.logprobs is not None else ()
    ):
        ranked = [(token_id, logprob, rank)]
        ranked += [(other, value, place) for place, (other, value) in enumerate(top[:n_top], 1) if other != token_id]
        body.append(
            {
                str(other): {"logprob": _finite(value), "rank": place, "decoded_token": spelled[other]}
                for other, value, place in ranked
            }
        )
    return body


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
