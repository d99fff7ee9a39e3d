"""OpenAI's text completions: the body, the answer, the chunks."""

from typing import Annotated, Any

from msgspec import Meta

from emberline.api.common.answer import usage_body
from emberline.api.common.sampling_fields import Generation, TokenId, session_name
from emberline.api.http.body import UnsupportedField, refuse_unsupported, unsupported
from emberline.api.http.call import Call
from emberline.api.http.errors import Names
from emberline.api.openai.chat import LEAST_LOGPROB
from emberline.api.openai.chunk_stream import ChunkStream, StreamOptions
from emberline.protocol import token_ids as tokens
from emberline.protocol.answer import Answer, AnswerChoice
from emberline.protocol.errors import BadInput
from emberline.protocol.events import TextLogprob
from emberline.protocol.request import GenerateRequest

MAX_PROMPTS = 128

Prompts = Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]


class CompletionRequest(Generation, kw_only=True):
    model: str
    prompt: str | Prompts
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: int | None = None
    echo: UnsupportedField = None
    suffix: UnsupportedField = None
    tools: UnsupportedField = None
    functions: UnsupportedField = None

    def to_requests(self, call: Call) -> list[GenerateRequest]:
        """One request per prompt; the first carries the call's own id, the others ids of their own."""
        refuse_unsupported(self)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of")
        output, field = self.output()
        call.names = Names(output=field)
        sampling, session = self.sampling(1.0, self.logprobs), session_name(call, self.prompt_cache_key, self.user)
        return [
            GenerateRequest(
                id=call.id if number == 0 else f"{call.id}-{number}",
                model=self.model,
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling,
                n=self.n or 1,
                session=session,
                priority=self.priority,
                reject_if_busy=self.rejects_waiting,
                output=output,
            )
            for number, prompt in enumerate(self._prompts())
        ]

    def _prompts(self) -> list[str | bytes]:
        """A text, a list of texts, one prompt's token ids, or a list of those."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if all(isinstance(item, int) for item in given):
            return [tokens.pack(item for item in given if isinstance(item, int))]
        if len(given) > MAX_PROMPTS:
            raise BadInput(f"`prompt` may have {MAX_PROMPTS} entries, not {len(given)}", param="prompt")
        if any(isinstance(item, int) for item in given):
            raise BadInput("`prompt` mixes token ids with texts or lists", param="prompt")
        return [item if isinstance(item, str) else tokens.pack(item) for item in given if not isinstance(item, int)]


def completion_body(call: Call, body: CompletionRequest, created: int, answer: Answer) -> dict[str, Any]:
    whole = {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": created,
        "model": body.model,
        "choices": [_choice(index, choice, body.logprobs is not None) for index, choice in enumerate(answer.choices)],
        "usage": usage_body(answer.usage),
    }
    return whole | body.tier_echo


def _choice(index: int, choice: AnswerChoice, with_logprobs: bool) -> dict[str, Any]:
    logprobs = _logprobs(choice.logprobs, 0) if with_logprobs else None
    return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}


def _logprobs(chosen: list[TextLogprob], offset: int) -> dict[str, Any]:
    """Parallel lists, one entry a token; `offset` is where the first token's text begins, in characters."""
    offsets: list[int] = []
    for token in chosen:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in chosen],
        "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in chosen],
        "top_logprobs": [{other.token: max(other.logprob, LEAST_LOGPROB) for other in token.top} for token in chosen],
        "text_offset": offsets,
    }


class CompletionStream(ChunkStream):
    before_text = b'"text":'
    after_text = b""
    last = b'"text":""'

    def __init__(self, call: Call, body: CompletionRequest, created: int, n_choices: int) -> None:
        head = {"id": f"cmpl-{call.id}", "object": "text_completion", "created": created, "model": body.model}
        super().__init__(call, head | body.tier_echo, n_choices, body.stream_options)
        self._offsets = [0] * n_choices

    def logprobs(self, index: int, tokens: list[TextLogprob]) -> dict[str, Any]:
        offset = self._offsets[index]
        self._offsets[index] += sum(len(token.token) for token in tokens)
        return _logprobs(tokens, offset)
