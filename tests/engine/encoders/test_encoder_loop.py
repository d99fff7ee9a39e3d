"""The step loop of encoders over a fake model: batches, turns, and exactly one terminal delta for each request."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberline.engine.encoders.encoder_loop import EncoderLimits, EncoderLoop
from emberline.models.encoder import PackedTexts
from emberline.protocol.encoding import EncodeParams
from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest, Priority, SamplingParams
from emberline.protocol.token_ids import pack

LIMITS = EncoderLimits(vocab_size=100, max_len=50, token_budget=40)
POISON = 99  # a token that the fake model cannot compute


class FakeModel:
    """The hidden state of a token is [its id, its position]."""

    backend = "fake"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def hidden(self, texts: PackedTexts) -> torch.Tensor:
        self.batches.append(texts.lens)
        if (texts.token_ids == POISON).any():
            raise RuntimeError("poison")
        return torch.stack([texts.token_ids.float(), texts.positions().float()], 1)

    def logits(self, first: torch.Tensor) -> torch.Tensor:
        return first.sum(1, keepdim=True)


def request(name: str, texts: list[list[int]], priority: Priority = Priority.DEFAULT, **params) -> EngineRequest:
    params = {"normalize": False} | params
    return EngineRequest(
        id=name,
        prompt_ids=pack(token for text in texts for token in text),
        sampling=SamplingParams(),
        priority=priority,
        encode=EncodeParams(lens=pack(map(len, texts)), **params),
    )


def run(loop: EncoderLoop) -> list[TokenDelta]:
    deltas = []
    while loop.busy:
        deltas += loop.step(0.0)
    return deltas


def rows(delta: TokenDelta) -> list[list[float]]:
    return np.frombuffer(delta.values, "<f4").reshape(-1, 2).tolist()


def test_texts_of_several_requests_share_a_step() -> None:
    model = FakeModel()
    loop = EncoderLoop(model, LIMITS)
    loop.submit(request("a", [[4, 6], [8]]), 0.0)
    loop.submit(request("b", [[2] * 10], pooling="last"), 0.0)
    found = {delta.id: delta for delta in run(loop)}
    assert model.batches == [[2, 1, 10]]
    assert rows(found["a"]) == [[5, 0.5], [8, 0]]
    assert rows(found["b"]) == [[2, 9]]
    assert found["a"].usage.prompt_tokens == 3
    assert loop.load.computed_tokens == 13
    assert loop.load.steps == 1


def test_a_long_list_delays_others_by_one_step() -> None:
    model = FakeModel()
    loop = EncoderLoop(model, LIMITS)
    loop.submit(request("list", [[1] * 20] * 50), 0.0)
    first = loop.step(0.0)
    assert [(delta.id, delta.finish) for delta in first] == [("list", None)]  # its client learns that it has begun
    loop.submit(request("short", [[3] * 20]), 0.0)
    assert ("short", "stop") in [(delta.id, delta.finish) for delta in loop.step(0.0)]
    (last,) = run(loop)
    assert len(rows(last)) == 50
    assert loop.load.waiting_tokens == 0


def test_higher_classes_go_first() -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    loop.submit(request("batch", [[1] * 30], Priority.BATCH), 0.0)
    loop.submit(request("now", [[1] * 30], Priority.PRIORITY), 0.0)
    assert loop.load.waiting_batch == 1
    assert [delta.id for delta in run(loop)] == ["now", "batch"]


def test_a_text_that_cannot_be_computed_fails_alone() -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    loop.submit(request("bad", [[1], [POISON], [2]]), 0.0)
    loop.submit(request("good", [[7]]), 0.0)
    found = {delta.id: delta for delta in run(loop)}
    assert found["bad"].finish == "error"
    assert found["bad"].error.kind == "internal"
    assert rows(found["good"]) == [[7, 0]]


def test_vectors_are_cut_then_normalized_and_logits_are_not() -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    loop.submit(request("v", [[3, 3, 3]], pooling="last", normalize=True, dimensions=1), 0.0)
    (delta,) = run(loop)
    assert np.frombuffer(delta.values, "<f4").tolist() == [1.0]
    loop = EncoderLoop(FakeModel(), LIMITS, classifies=True)
    loop.submit(request("c", [[3, 9]], normalize=True), 0.0)
    (delta,) = run(loop)
    assert np.frombuffer(delta.values, "<f4").tolist() == [3.0]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (EngineRequest(id="x", prompt_ids=pack([1]), sampling=SamplingParams()), "does not generate"),
        (request("x", [[1] * 51]), "51 tokens"),
        (request("x", [[1], []]), "do not match"),
        (request("x", []), "do not match"),
        (request("x", [[100]]), "vocabulary"),
    ],
)
def test_what_cannot_be_computed_is_refused(bad: EngineRequest, why: str) -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    with pytest.raises(BadInput, match=why):
        loop.submit(bad, 0.0)
    assert not loop.busy


def test_deadlines_and_shutdown_end_requests() -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    late = EngineRequest(
        id="late", prompt_ids=pack([1]), sampling=SamplingParams(), deadline_s=1, encode=EncodeParams(lens=pack([1]))
    )
    loop.submit(late, 0.0)
    (delta,) = loop.step(2.0)
    assert delta.error.kind == "deadline_exceeded"
    loop.submit(request("x", [[1]]), 0.0)
    (delta,) = loop.abort_all(Unavailable("closing"))
    assert delta.finish == "error"
    assert not loop.busy


texts = st.lists(st.lists(st.integers(1, POISON), min_size=1, max_size=45), min_size=1, max_size=6)
acts = st.lists(st.one_of(texts, st.integers(0, 8), st.none()), max_size=20)  # submit, abort, step


@given(acts)
def test_every_request_ends_once(acts: list[object]) -> None:
    loop = EncoderLoop(FakeModel(), LIMITS)
    submitted: list[str] = []
    deltas: list[TokenDelta] = []
    for act in acts:
        if isinstance(act, list):
            submitted.append(f"r{len(submitted)}")
            loop.submit(request(submitted[-1], act), 0.0)
        elif isinstance(act, int):
            deltas += [delta] if (delta := loop.abort(f"r{act}")) is not None else []
        else:
            deltas += loop.step(0.0)
    deltas += run(loop)
    assert sorted(delta.id for delta in deltas if delta.finish) == sorted(submitted)
    assert loop.load.waiting_tokens == 0
