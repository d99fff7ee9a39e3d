"""Encoding texts, as every API needs it: the request that a body asks for, computed while its client waits."""

import asyncio
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.unsupported_fields import TrueField, UnsupportedField, refuse_unsupported
from emberline.api.http.exchange import HttpExchange, encode
from emberline.protocol.complete_response import Answer, Encoded
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.request import EncodeRequest

_ROWS_AT_ONCE = 32
Truncate = bool | Literal["NONE", "END"]


class PeerEncodeFields(msgspec.Struct, kw_only=True):
    """Fields of generation and of other servers' embeddings, which would change the vectors: they are refused."""

    stream: UnsupportedField = None
    messages: UnsupportedField = None
    prompt: UnsupportedField = None
    instruction: UnsupportedField = None
    image: UnsupportedField = None
    images: UnsupportedField = None
    # Cohere, Voyage, Jina, vLLM, SGLang, text-embeddings-inference
    input_type: UnsupportedField = None
    output_dtype: UnsupportedField = None
    output_dimension: UnsupportedField = None
    embedding_type: UnsupportedField = None
    embedding_types: UnsupportedField = None
    embed_dtype: UnsupportedField = None
    late_chunking: UnsupportedField = None
    task: UnsupportedField = None
    instruct: UnsupportedField = None
    prompt_name: UnsupportedField = None
    lora_path: UnsupportedField = None
    priority: UnsupportedField = None
    raw_scores: UnsupportedField = None
    normalize: TrueField = None
    normalized: TrueField = None
    use_activation: TrueField = None
    add_special_tokens: TrueField = None


class EncodeFields(PeerEncodeFields, kw_only=True):
    """Fields of every request to encode texts, but Ollama's."""

    truncate: Truncate | None = None  # Cohere's NONE and END too
    truncate_inputs: bool | None = None  # Workers AI's name
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=-1)] | None = None  # vLLM's name; -1: to what fits

    @property
    def wants_rows(self) -> bool:
        """True if the vectors are lists of numbers in the reply."""
        return True

    @property
    def truncates(self) -> bool:
        refuse_unsupported(self)
        named = self.truncate is True or self.truncate == "END"
        return named or bool(self.truncate_inputs) or self.truncate_prompt_tokens is not None


async def run_encoding(call: HttpExchange, request: EncodeRequest) -> Encoded:
    """Encode texts for the caller. A client that disconnects cancels the work."""
    encoded: Encoded = await call.result(request)
    return encoded


def encoded_of(answer: Answer) -> Encoded:
    if answer.encoded is None:
        raise Internal("the result has no vectors")
    return answer.encoded


class EncodedJson(Encoded, kw_only=True):
    """A result whose vectors are JSON already."""

    json: list[msgspec.Raw]

    def rows(self) -> Iterator[Any]:
        return iter(self.json)


async def with_json_rows(encoded: Encoded) -> EncodedJson:
    return EncodedJson(**msgspec.structs.asdict(encoded), json=await json_rows(encoded))


async def json_rows(encoded: Encoded) -> list[msgspec.Raw]:
    """The vectors as JSON. Thousands take a tenth of a second and more: other requests go on in between."""
    rows: list[msgspec.Raw] = []
    for row in encoded.rows():
        if len(rows) % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await asyncio.sleep(0)
        rows.append(msgspec.Raw(encode(row)))
    return rows


def check_top(top: int | None, field: str) -> int | None:
    if top is not None and top < 1:
        raise BadInput(f"`{field}` must be at least 1", param=field)
    return top


def ranking(encoded: Encoded, top: int | None) -> list[tuple[int, float]]:
    """The texts by index, best first, with their scores."""
    scores = [row[0] for row in encoded.rows()]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [(index, scores[index]) for index in order[:top]]
