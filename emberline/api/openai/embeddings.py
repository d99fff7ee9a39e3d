"""The OpenAI API's embeddings, and reranking in the shape of Jina and Cohere."""

import base64
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.encoding import EncodeFields, check_top, encoded_of, ranking
from emberline.api.common.form import Form
from emberline.api.common.response_body import cost_field
from emberline.api.common.sampling_fields import ModelName, required_model
from emberline.api.http.errors import FieldNames
from emberline.protocol.complete_response import Answer, Encoded
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.request import EncodeRequest
from emberline.protocol.token_ids import pack

Json = dict[str, Any]
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]


class EmbeddingsRequest(EncodeFields, kw_only=True):
    model: ModelName = ""
    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None

    @property
    def wants_rows(self) -> bool:
        return self.encoding_format != "base64"

    def to_request(self, request_id: str, session: str | None = None) -> tuple[EncodeRequest, FieldNames]:
        texts, token_ids, is_list = self._input()
        request = EncodeRequest(
            id=request_id,
            model=required_model(self.model),
            texts=texts,
            token_ids=token_ids,
            dimensions=self.dimensions,
            truncate=self.truncates,
            api="embeddings",
        )
        return request, FieldNames(texts="input", one_text=not is_list)

    def _input(self) -> tuple[tuple[str, ...], tuple[bytes, ...], bool]:
        """Texts, or token ids, and whether there is a list of them: one list of numbers is one text."""
        given = self.input
        if isinstance(given, str):
            return (given,), (), False
        texts = [item for item in given if isinstance(item, str)]
        numbers = [item for item in given if isinstance(item, int)]
        lists = [item for item in given if isinstance(item, list)]
        if len(given) not in (len(texts), len(numbers), len(lists)):
            raise BadInput("`input` is a text, a list of texts, or token ids: not a mixture of them", param="input")
        if texts or not given:
            return tuple(texts), (), True
        return ((), (pack(numbers),), False) if numbers else ((), tuple(map(pack, lists)), True)


def embeddings_body(request_id: str, body: EmbeddingsRequest, created: int, answer: Answer) -> Json:
    encoded = encoded_of(answer)
    if encoded.pooling is None:
        raise BadInput(f"{body.model} makes no vectors: ask for /v1/rerank or `run`", param="model")
    vectors: Iterator[Any] = encoded.rows()
    if body.encoding_format == "base64":
        vectors = (base64.b64encode(row).decode() for row in encoded.row_bytes())
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"object": "list", "data": data, "model": body.model, "usage": _usage(encoded)}


def _usage(encoded: Encoded) -> Json:
    n_tokens = encoded.usage.prompt_tokens
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens, **cost_field(encoded.usage)}


EMBEDDINGS = Form(
    decoder=msgspec.json.Decoder(EmbeddingsRequest), to_task=EmbeddingsRequest.to_request, to_body=embeddings_body
)


class Document(msgspec.Struct):
    text: str


class RerankRequest(EncodeFields, kw_only=True):
    model: ModelName = ""
    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    rank_fields: Any = None
    max_tokens_per_doc: Any = None
    max_chunks_per_doc: Any = None

    def to_request(self, request_id: str, session: str | None = None) -> tuple[EncodeRequest, FieldNames]:
        for field in ("rank_fields", "max_tokens_per_doc", "max_chunks_per_doc"):
            if getattr(self, field) is not None:
                raise Unsupported(f"`{field}` is not supported; use `truncate`", param=field)
        check_top(self.top_n, "top_n")
        request = EncodeRequest(
            id=request_id,
            model=required_model(self.model),
            texts=self.texts,
            query=self.query,
            truncate=self.truncates,
            api="rerank",
        )
        return request, FieldNames(texts="documents")

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(item if isinstance(item, str) else item.text for item in self.documents)


def _rerank_body(returns_documents: bool, request_id: str, body: RerankRequest, created: int, answer: Answer) -> Json:
    encoded, texts = encoded_of(answer), body.texts
    if body.return_documents is not None:
        returns_documents = body.return_documents
    results: list[Json] = []
    for index, score in ranking(encoded, body.top_n):
        document = {"document": {"text": texts[index]}} if returns_documents else {}
        results.append({"index": index, "relevance_score": score} | document)
    meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    found = {"id": request_id, "object": "list", "model": body.model, "results": results}
    return found | {"usage": _usage(encoded), "meta": meta}


# In Jina's form the documents come back unless `return_documents` is false; in Cohere's, they do only if it is true.
RERANK, RERANK_V2 = (
    Form(
        decoder=msgspec.json.Decoder(RerankRequest),
        to_task=RerankRequest.to_request,
        to_body=partial(_rerank_body, returns_documents),
    )
    for returns_documents in (True, False)
)
