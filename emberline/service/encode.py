"""A request to encode texts on our own engines: prepared here, computed by an encoder, its rows made into scores."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from emberline.cluster.engine_client import EngineClient
from emberline.cluster.served_models import Served
from emberline.cluster.timings import DEFAULTS, Timings
from emberline.protocol.complete_response import Encoded
from emberline.protocol.encoding import EncodeParams
from emberline.protocol.errors import BadInput, Internal, Unsupported
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EncodeRequest, EngineRequest, Principal, SamplingParams
from emberline.protocol.route_request import RouteRequest, route_request
from emberline.protocol.token_ids import count, pack
from emberline.service.single_result_request import EngineCall
from emberline.telemetry.request_log import Clock, JobContext, in_flight_id, route_terms
from emberline.text.text_encoder import EncodedTexts, TextEncoder

MAX_TEXTS = 2048  # of one request, as OpenAI's
_SAMPLING = SamplingParams()


@dataclass(frozen=True, slots=True)
class PreparedEncoding:
    """A request whose texts are tokenized."""

    request: EncodeRequest
    principal: Principal
    served: Served
    info: EngineInfo
    texts: EncodedTexts
    params: EncodeParams
    clock: Clock

    @property
    def n_tokens(self) -> int:
        return count(self.texts.ids)

    def route(self, job: JobContext | None) -> RouteRequest:
        """The request as admission sees it. A worker keeps nothing of a session that only encodes texts."""
        terms = route_terms(self.request, self.clock, job)._replace(session=None)
        model, version = self.served.card.id, self.info.fingerprint
        return route_request(terms, self.principal, model, version, input_tokens=self.n_tokens)


def text_bytes(request: EncodeRequest) -> int:
    """Approximate bytes of text to tokenize."""
    return sum(map(len, request.texts)) + len(request.query or "") * len(request.texts)


def prepare_encoding(
    request: EncodeRequest, principal: Principal, served: Served, info: EngineInfo, clock: Clock
) -> PreparedEncoding:
    """Refuses everything that can be refused without an engine."""
    encoder = served.encoder
    _validate(request, encoder)
    most = served.card.capabilities.output_dimensions
    if request.dimensions is not None and most and request.dimensions > most:
        raise BadInput(f"`dimensions` is at most {most:,}, as {request.model} has them", param="dimensions")
    texts = _tokenize(request, encoder)
    params = EncodeParams(
        lens=pack(texts.lens),
        second_starts=b"" if texts.second_starts is None else pack(texts.second_starts),
        pooling=request.pooling or encoder.task.pooling,
        normalize=encoder.task.normalize,
        dimensions=request.dimensions or 0,
    )
    return PreparedEncoding(request, principal, served, info, texts, params, clock)


def _validate(request: EncodeRequest, encoder: TextEncoder) -> None:
    task = encoder.task
    if not request.n_texts:
        raise BadInput("there is no text to encode", param="texts")
    if request.n_texts > MAX_TEXTS:
        raise BadInput(
            f"{request.n_texts:,} texts are too many for one request, which takes {MAX_TEXTS:,}", param="texts"
        )
    if request.api == "embeddings" and task.task != "embed":
        raise BadInput(f"{request.model} makes no vectors: ask for /v1/rerank or `run`", param="model")
    if (task.task == "rerank") != (request.query is not None):
        if request.query is None:
            raise BadInput(f"{request.model} is a reranker and needs a query to score the texts against", param="query")
        raise BadInput(f"{request.model} is no reranker: it takes no query", param="query")
    if request.pooling == "last" or (request.pooling is not None and task.pooling == "last"):
        raise Unsupported("`pooling` is mean or cls, of models that were trained so", param="pooling")
    if request.dimensions is not None and not task.matryoshka:
        raise Unsupported(f"{request.model} has vectors of one size: leave `dimensions` out", param="dimensions")
    if request.dimensions is not None and request.dimensions < 1:
        raise BadInput("`dimensions` must be at least 1", param="dimensions")


def _tokenize(request: EncodeRequest, encoder: TextEncoder) -> EncodedTexts:
    if not request.token_ids:
        return encoder.encode(request.texts, request.query, truncate=request.truncate, most=request.context_len)
    given = [ids[: 4 * encoder.max_len] for ids in request.token_ids] if request.truncate else request.token_ids
    lens = [count(ids) for ids in given]
    for index, (ids, length) in enumerate(zip(given, lens, strict=True)):
        encoder.check_length(length, index)
        highest = int(np.frombuffer(ids, "<u4").max())
        if highest >= encoder.vocab_size:
            message = f"token id {highest} is beyond the vocabulary of {encoder.vocab_size}"
            raise BadInput(message, param=f"texts[{index}]")
    return EncodedTexts(b"".join(given), lens)


class EncodeCall(EngineCall):
    """Encodes all texts of a request."""

    def __init__(
        self,
        prepared: PreparedEncoding,
        engines: Mapping[str, EngineClient],
        job: JobContext | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        request = EngineRequest(
            id=in_flight_id(prepared.request.id, job),
            prompt_ids=prepared.texts.ids,
            sampling=_SAMPLING,
            priority=prepared.request.priority,
            encode=prepared.params,
        )
        super().__init__(request, engines, "embeddings", timings)
        self._prepared = prepared

    def result(self) -> Encoded:
        assert self.values is not None
        prepared = self._prepared
        task, n_rows = prepared.served.encoder.task, prepared.request.n_texts
        if not self.values or len(self.values) % (4 * n_rows):
            raise Internal("the engine returned a result of another size")
        if task.task == "embed":
            return Encoded(values=self.values, n_rows=n_rows, usage=self.usage, pooling=prepared.params.pooling)
        logits = np.frombuffer(self.values, "<f4").reshape(n_rows, -1)
        scores = _sigmoid(logits) if task.task == "rerank" or task.multi_label else _softmax(logits)
        values = scores.astype("<f4").tobytes()
        return Encoded(values=values, n_rows=n_rows, usage=self.usage, labels=task.labels)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-np.clip(x.astype(np.float64), -700, 700)))


def _softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    powers = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    scores: NDArray[np.float64] = powers / powers.sum(axis=1, keepdims=True)
    return scores
