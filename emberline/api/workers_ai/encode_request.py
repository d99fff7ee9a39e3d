"""The input and result of Workers AI's models that encode text: embeddings, rerankers and classifiers."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from emberline.api.common.encoding import EncodeFields, check_top, encoded_of, ranking
from emberline.api.common.response_body import usage_body
from emberline.api.http.errors import FieldNames
from emberline.api.workers_ai.run_request import RunOptions
from emberline.catalog.model_card import TEXT_CLASSIFICATION, TEXT_EMBEDDINGS, ModelCard
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import BadInput
from emberline.protocol.request import EncodeRequest

Json = dict[str, Any]


def encodes_text(card: ModelCard) -> bool:
    return card.task in (TEXT_EMBEDDINGS, TEXT_CLASSIFICATION)


class Context(msgspec.Struct):
    text: str


class EncodeInput(EncodeFields, kw_only=True):
    """`text` for vectors and labels; `query` and `contexts` for a reranker."""

    text: str | list[str] | None = None
    pooling: Literal["mean", "cls"] | None = None
    query: str | None = None
    contexts: list[Context] | None = None
    top_k: Annotated[int, Meta(ge=1)] | None = None
    options: RunOptions | None = None
    requests: Annotated[list[msgspec.Raw], Meta(min_length=1)] | None = None  # inputs for the queue
    request_id: str | None = None  # of queued inputs: asks for their status
    external_reference: Any = None  # of an input in `requests`

    @property
    def for_queue(self) -> bool:
        """True if the body submits to the queue or polls it."""
        queued = self.options is not None and bool(self.options.queue_request)
        return queued or self.requests is not None or self.request_id is not None

    def to_request(self, request_id: str, session: str | None, model: str) -> tuple[EncodeRequest, FieldNames]:
        if (self.text is None) == (self.contexts is None):
            raise BadInput("a `text`, or a `query` and `contexts` for a reranker, is needed", param="text")
        check_top(self.top_k, "top_k")
        names = FieldNames(texts="contexts") if self.text is None else FieldNames(texts="text", one_text=self.is_one)
        request = EncodeRequest(
            id=request_id,
            model=model,
            texts=self._texts(),
            query=self.query,
            pooling=self.pooling,
            truncate=self.truncates,
            api="run",
            reject_if_busy=bool(self.options and self.options.reject_if_busy),
        )
        return request, names

    @property
    def is_one(self) -> bool:
        return isinstance(self.text, str)

    def _texts(self) -> tuple[str, ...]:
        if self.text is None:
            return tuple(context.text for context in self.contexts or ())
        return (self.text,) if isinstance(self.text, str) else tuple(self.text)


def encoded_result(request_id: str, given: EncodeInput, created: int, answer: Answer) -> Any:
    """Build the result for the model's task: vectors, reranker scores or labels, for one text or for each."""
    encoded = encoded_of(answer)
    if encoded.pooling is not None:
        shape = [encoded.n_rows, len(encoded.values) // 4 // encoded.n_rows]
        return {
            "shape": shape,
            "data": list(encoded.rows()),
            "pooling": encoded.pooling,
            "usage": usage_body(encoded.usage),
        }
    if len(encoded.labels) == 1:
        ranked = [{"id": index, "score": score} for index, score in ranking(encoded, given.top_k)]
        return {"response": ranked, "usage": usage_body(encoded.usage)}
    labeled = [_labels(encoded.labels, row, given.top_k) for row in encoded.rows()]
    return labeled[0] if given.is_one else labeled


def _labels(labels: Sequence[str], scores: list[float], top: int | None) -> list[Json]:
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return [{"label": labels[index], "score": scores[index]} for index in order[:top]]


_NUMBERS = {"type": "array", "items": {"type": "number"}}
_LABEL = {"type": "object", "properties": {"label": {"type": "string"}, "score": {"type": "number"}}}
# Of `models/schema`, by the task's name.
OUTPUT_SCHEMAS: dict[str, Json] = {
    TEXT_EMBEDDINGS: {
        "type": "object",
        "contentType": "application/json",
        "properties": {
            "shape": _NUMBERS,
            "data": {"type": "array", "items": _NUMBERS},
            "pooling": {"enum": ["mean", "cls", "last"]},
        },
        "required": ["shape", "data"],
    },
    TEXT_CLASSIFICATION: {
        "oneOf": [
            {"type": "array", "contentType": "application/json", "items": _LABEL},
            {
                "type": "object",
                "contentType": "application/json",
                "properties": {
                    "response": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {"id": {"type": "integer"}, "score": {"type": "number"}},
                        },
                    }
                },
            },
        ]
    },
}
