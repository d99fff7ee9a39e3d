"""The step loop of an encoder: each step computes a packed batch of texts, of as many requests as there is room for."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from emberline.engine.core.step_times import smoothed
from emberline.engine.encoders.request_loop import RequestLoop, deadline_s
from emberline.protocol.encoding import EncodeParams, Pooling
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.events import TokenDelta, Usage
from emberline.protocol.frames import EngineLoad
from emberline.protocol.request import EngineRequest, Priority

if TYPE_CHECKING:
    from emberline.models.encoder import EncoderModel

MAX_WAITING = 4096  # requests

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EncoderLimits:
    vocab_size: int
    max_len: int  # tokens of a text
    token_budget: int  # of a step; a longer text is computed alone


@dataclass(slots=True, eq=False)
class _Encoding:
    """A request whose texts are not all computed yet."""

    request: EngineRequest
    params: EncodeParams
    ids: NDArray[np.int64]
    starts: NDArray[np.int64]  # of each text in `ids`, and the end of the last
    seconds: NDArray[np.uint32] | None
    number: int  # in order of arrival
    deadline_s: float | None  # monotonic
    rows: list[NDArray[np.float32]] = field(default_factory=list)  # results, in order
    n_taken: int = 0  # texts that were planned
    begun: bool = False  # its client knows that it is being computed

    @property
    def running(self) -> bool:
        return self.n_taken > 0

    @property
    def n_texts(self) -> int:
        return len(self.starts) - 1

    @property
    def n_tokens(self) -> int:
        return int(self.starts[-1])

    @property
    def tokens_left(self) -> int:
        return self.n_tokens - int(self.starts[self.n_taken])

    def text(self, index: int) -> NDArray[np.int64]:
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.n_tokens)

    def partial_usage(self) -> Usage:
        return Usage(prompt_tokens=int(self.starts[self.n_taken]), partial=True)


_Text = tuple[_Encoding, int]  # a request, and the index of one of its texts


class EncoderLoop(RequestLoop[_Encoding]):
    """Requests take turns: first those of the higher class, then those of which the fewest tokens were computed. So a
    list of thousands of texts delays others by one step."""

    def __init__(
        self,
        model: "EncoderModel",
        limits: EncoderLimits,
        *,
        classifies: bool = False,
        cpu_share: AbstractContextManager[None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(MAX_WAITING, cpu_share, clock)
        self._model = model
        self._limits = limits
        self._classifies = classifies
        self._rate = 0.0  # tokens per second

    @property
    def load(self) -> EngineLoad:
        waiting_tokens = sum(item.tokens_left for item in self._requests.values())
        return msgspec.structs.replace(super().load, waiting_tokens=waiting_tokens, prefill_rate=self._rate)

    # --- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """BadInput for what the model cannot compute: texts are checked here as well, so that no step fails by them."""
        params = request.encode
        if params is None:
            raise BadInput("this engine encodes texts and does not generate any")
        self._check_room(request)
        ids = np.frombuffer(request.prompt_ids, "<u4").astype(np.int64)
        lens = np.frombuffer(params.lens, "<u4").astype(np.int64)
        seconds = np.frombuffer(params.second_starts, "<u4") if params.second_starts else None
        matching = seconds is None or len(seconds) == len(lens)
        if not len(lens) or lens.min() < 1 or lens.sum() != len(ids) or not matching:
            raise BadInput("the lengths of the texts do not match their tokens")
        if lens.max() > self._limits.max_len:
            raise BadInput(f"a text has {lens.max()} tokens, and the model takes {self._limits.max_len}")
        if ids.max() >= self._limits.vocab_size:
            raise BadInput(f"token id {ids.max()} is beyond the vocabulary of {self._limits.vocab_size}")
        starts = np.concatenate([[0], lens.cumsum()])
        until_s = deadline_s(request, now_s)
        self._add(_Encoding(request, params, ids, starts, seconds, self._n_submitted, until_s))

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self, now_s: float) -> list[TokenDelta]:
        deltas = self._fail_late(now_s)
        texts = self._plan()
        if not texts:
            return deltas
        n_tokens = sum(len(item.text(index)) for item, index in texts)
        self.step_s = n_tokens / self._rate if self._rate else 0.0
        self.in_step = True
        began_s = self._clock()
        with self._cpu_share:
            rows = self._compute(texts)
        took_s = self._clock() - began_s
        self.in_step = False
        self._steps += 1
        self._device.add(took_s, all(item.request.priority == Priority.BATCH for item, _ in texts))
        self.computed_tokens += n_tokens
        if took_s > 0:
            self._rate = smoothed(self._rate, n_tokens / took_s)
        return deltas + self._absorb(texts, rows)

    def _plan(self) -> list[_Text]:
        """The texts of the next step, at least one if there is work."""
        waiting = sorted(
            self._requests.values(),
            key=lambda item: (item.request.priority, int(item.starts[item.n_taken]), item.number),
        )
        texts: list[_Text] = []
        room = self._limits.token_budget
        for item in waiting:
            while item.n_taken < item.n_texts:
                n_tokens = len(item.text(item.n_taken))
                if texts and n_tokens > room:
                    return texts
                texts.append((item, item.n_taken))
                item.n_taken += 1
                room -= n_tokens
        return texts

    def _compute(self, texts: list[_Text]) -> list[NDArray[np.float32] | None]:
        """One row for each text; None where even the text alone cannot be computed."""
        try:
            return list(self._rows(texts))
        except Exception:
            _log.exception("a step failed; its texts are computed one by one", extra={"texts": len(texts)})
        rows: list[NDArray[np.float32] | None] = []
        for text in texts:
            try:
                rows += self._rows([text])
            except Exception:
                rows.append(None)
        return rows

    def _rows(self, texts: list[_Text]) -> list[NDArray[np.float32]]:
        import torch

        from emberline.models.encoder import PackedTexts, pool

        lens = [len(item.text(index)) for item, index in texts]
        ids = torch.from_numpy(np.concatenate([item.text(index) for item, index in texts]))
        hidden = self._model.hidden(PackedTexts(ids, lens, _second_starts(texts)))
        if self._classifies:
            firsts = pool(hidden, lens, ["cls"] * len(lens))
            return list(self._model.logits(firsts).cpu().numpy())
        poolings: list[Pooling] = [item.params.pooling for item, _ in texts]
        vectors: NDArray[np.float32] = pool(hidden, lens, poolings).cpu().numpy()
        return [_finished(vector, item.params) for vector, (item, _) in zip(vectors, texts, strict=True)]

    def _absorb(self, texts: list[_Text], rows: list[NDArray[np.float32] | None]) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        for (item, _), row in zip(texts, rows, strict=True):
            if item.request.id not in self._requests:
                continue  # another of its texts has failed
            if row is None or not np.isfinite(row).all():
                deltas.append(self._failed(item, Internal("the engine could not compute this text")))
                continue
            item.rows.append(row)
            if len(item.rows) == item.n_texts:
                del self._requests[item.request.id]
                values = np.concatenate(item.rows).astype("<f4").tobytes()
                deltas.append(TokenDelta(item.request.id, finish="stop", usage=item.usage(), values=values))
        for item in {id(item): item for item, _ in texts}.values():
            if item.request.id in self._requests and not item.begun:
                item.begun = True
                deltas.append(TokenDelta(item.request.id, usage=item.usage()))
        return deltas


def _second_starts(texts: list[_Text]) -> list[int] | None:
    if all(item.seconds is None for item, _ in texts):
        return None
    return [len(item.text(i)) if item.seconds is None else int(item.seconds[i]) for item, i in texts]


def _finished(vector: NDArray[np.float32], params: EncodeParams) -> NDArray[np.float32]:
    """Cut to the dimensions asked for, then normalized."""
    if params.dimensions:
        vector = vector[: params.dimensions]
    if not params.normalize:
        return vector
    normalized: NDArray[np.float32] = vector / np.maximum(np.sqrt(np.dot(vector, vector)), np.float32(1e-12))
    return normalized
