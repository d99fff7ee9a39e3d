"""Prompts as token ids, and token ids as text, for clients that ask for them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import GenerateRequest
from emberline.protocol.token_ids import unpack
from emberline.service.prepare import check_countable
from emberline.service.validation import validate_prompt
from emberline.text.prompt import build_prompt
from emberline.text.text_model import TextModel
from emberline.upstream.target import Target

T = TypeVar("T")


class TokenizedPrompt(NamedTuple):
    """The token ids of a prompt."""

    ids: list[int]
    max_len: int  # tokens that prompt and reply may have together
    entries: list[str] | None = None  # of the tokenizer's vocabulary


class Tokenizers(Protocol):
    """Access to the tokenizers of models, and to threads for long texts."""

    async def tokenizer(self, target: Target) -> tuple[TextModel, int]:
        """The tokenizer of a model, and the tokens that its context has. Raises Unsupported if it is not here."""

    async def run_off_loop(self, n_bytes: int, work: Callable[[], T], renders: TextModel | None = None) -> T: ...


async def tokenize(
    tokenizers: Tokenizers, request: GenerateRequest, target: Target, special: bool, entries: bool
) -> TokenizedPrompt:
    """Tokenize the prompt of a request as it would be computed. special: a text begins with the model's BOS token, if
    the model wants one. entries: the tokens' entries of the vocabulary are wanted, too."""
    text, max_len = await tokenizers.tokenizer(target)
    if any(message.parts and message.n_media for message in request.messages or ()):
        message = "images have no token ids: `/v1/messages/count_tokens` and `/v1/responses/input_tokens` count them"
        raise Unsupported(message, param="messages")
    n_chars = check_countable(request)

    def work() -> TokenizedPrompt:
        validate_prompt(request, text.vocab_size)
        if request.prompt is not None and not special:
            ids = unpack(text.encode(request.prompt, special=True))
        else:
            ids = unpack(build_prompt(text, request).ids)
        return TokenizedPrompt(ids, max_len, text.tokenizer.entries(ids) if entries else None)

    return await tokenizers.run_off_loop(n_chars, work, None if request.messages is None else text)


async def tokenizer_info(tokenizers: Tokenizers, target: Target) -> dict[str, str | None]:
    """The special tokens of a model by their names in chat templates, and its chat template."""
    text, _ = await tokenizers.tokenizer(target)
    named: dict[str, str | None] = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
    return {**named, **text.template.tokens, "chat_template": text.template.source}


async def detokenize(tokenizers: Tokenizers, ids: list[int], target: Target) -> str:
    """The text of token ids, special tokens included."""
    text, _ = await tokenizers.tokenizer(target)
    if (largest := max(ids, default=0)) >= text.vocab_size:
        raise BadInput(f"token id {largest} is not in the vocabulary of {text.vocab_size}", param="tokens")
    return await tokenizers.run_off_loop(4 * len(ids), lambda: text.decode(ids, special=True))


def unknown_tokenizer(model: str) -> Unsupported:
    """The error for a model whose tokenizer only its own server has."""
    message = f"the tokenizer of {model} is not on this server, which has those of its own models"
    return Unsupported(message, param="model")
