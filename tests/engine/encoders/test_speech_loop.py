"""The step loop of a speech model: turns, errors and what is counted."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from emberline.engine.encoders import speech_loop
from emberline.engine.encoders.speech import SAMPLE_RATE, Samples
from emberline.engine.encoders.speech_loop import MAX_WAITING, SpeechLoop
from emberline.protocol.errors import BadInput, Internal
from emberline.protocol.events import TokenDelta
from emberline.protocol.request import EngineRequest, Priority, SamplingParams
from emberline.protocol.speech import TranscribeParams, Transcript, TranscriptSegment


class FakeModel:
    """A segment for each second. A prompt of "fail" fails at the second segment."""

    def transcribe(self, samples: Samples, params: TranscribeParams) -> tuple[str, float, Iterator[TranscriptSegment]]:
        def segments() -> Iterator[TranscriptSegment]:
            for second in range(len(samples) // SAMPLE_RATE):
                if params.prompt == "fail" and second:
                    raise RuntimeError("broken")
                yield TranscriptSegment(start_s=second, end_s=second + 1, text=f" {second}")

        return "en", 0.9, segments()


@pytest.fixture(autouse=True)
def audio_is_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Audio of n bytes is n seconds long; b"bad" is none."""

    def decode(audio: bytes, max_ms: int) -> Iterator[Samples]:
        if audio == b"bad":
            raise BadInput("this is not audio that can be decoded")
        for _ in audio:
            yield np.zeros(SAMPLE_RATE, np.int16)

    monkeypatch.setattr(speech_loop, "decode_audio", decode)


def ask(name: str, audio: bytes = b"..", priority: Priority = Priority.DEFAULT, **fields: object) -> EngineRequest:
    params = TranscribeParams(audio=audio, max_audio_ms=10_000, **fields)  # type: ignore[arg-type]
    return EngineRequest(id=name, prompt_ids=b"", sampling=SamplingParams(), priority=priority, transcribe=params)


def run(loop: SpeechLoop) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    while loop.busy:
        before = loop.computed_tokens
        deltas += loop.step(0.0)
        assert loop.computed_tokens > before  # else it would be taken for one that hangs
    return deltas


def ends(deltas: list[TokenDelta]) -> dict[str, TokenDelta]:
    ended = [delta for delta in deltas if delta.finish is not None]
    assert len({delta.id for delta in ended}) == len(ended)
    return {delta.id: delta for delta in ended}


def test_a_transcript() -> None:
    loop = SpeechLoop(FakeModel(), ("en",))
    loop.submit(ask("a", b"..."), 0.0)
    end = ends(run(loop))["a"]
    transcript = msgspec.json.decode(end.values, type=Transcript)
    assert (transcript.text, transcript.audio_ms, transcript.language) == ("0 1 2", 3000, "en")
    assert end.usage is not None
    assert (end.usage.audio_ms, end.usage.prompt_tokens) == (3000, 0)


def test_long_recordings_take_turns_with_short_ones() -> None:
    loop = SpeechLoop(FakeModel(), ("en",))
    loop.submit(ask("long", b"." * 500), 0.0)
    loop.submit(ask("short", b"."), 0.0)
    loop.submit(ask("urgent", b".", Priority.PRIORITY), 0.0)
    assert list(ends(run(loop))) == ["urgent", "short", "long"]


def test_an_error_is_that_of_its_request() -> None:
    loop = SpeechLoop(FakeModel(), ("en",))
    loop.submit(ask("bad", b"bad"), 0.0)
    loop.submit(ask("broken", prompt="fail"), 0.0)
    loop.submit(ask("good"), 0.0)
    found = ends(run(loop))
    assert found["bad"].error is not None
    assert found["bad"].error.kind == BadInput.kind
    assert found["broken"].error is not None
    assert found["broken"].error.kind == Internal.kind
    assert found["good"].finish == "stop"


def test_refusals() -> None:
    loop = SpeechLoop(FakeModel(), ("en",))
    for request, problem in (
        (ask("a", language="xx"), "does not know the language"),
        (ask("a", translate=True), "cannot translate"),
        (EngineRequest(id="a", prompt_ids=b"", sampling=SamplingParams()), "nothing else"),
    ):
        with pytest.raises(BadInput, match=problem):
            loop.submit(request, 0.0)
    for number in range(MAX_WAITING):
        loop.submit(ask(str(number)), 0.0)
    for name in ("0", "more"):
        with pytest.raises(BadInput):
            loop.submit(ask(name), 0.0)


def test_deadlines_aborts_and_canaries() -> None:
    loop = SpeechLoop(FakeModel(), ("en",))
    loop.submit(msgspec.structs.replace(ask("late"), deadline_s=1.0), 0.0)
    loop.submit(ask("gone"), 0.0)
    loop.submit(ask("canary", b""), 0.0)
    aborted = loop.abort("gone")
    assert aborted is not None
    assert aborted.finish == "cancelled"
    deltas = loop.step(2.0) + run(loop)
    assert {name: delta.finish for name, delta in ends(deltas).items()} == {"late": "error", "canary": "stop"}
    assert loop.load.running == loop.load.waiting == 0
