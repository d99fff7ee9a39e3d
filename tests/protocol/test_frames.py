"""Whatever bytes arrive, decoding a frame succeeds or raises FrameError, and nothing else."""

import contextlib
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.kv.transfer import messages
from emberline.net import rpc
from emberline.protocol import frames
from emberline.protocol.errors import Overloaded
from emberline.protocol.frames import Abort, CalledTools, FrameBuffer, FrameError, Hello, Submit
from emberline.protocol.request import EngineRequest, SamplingParams
from emberline.service.core_link import TO_CORE, TO_HTTP_WORKER
from tests.examples import n_examples

DECODERS = {
    "hello": frames.hello_decoder,
    "to engine": frames.to_engine_decoder,
    "from engine": frames.from_engine_decoder,
    "to receiver": messages.to_receiver,
    "to sender": messages.to_sender,
    "to core": rpc.decoder(TO_CORE, TO_HTTP_WORKER),
    "from core": rpc.decoder(TO_HTTP_WORKER, TO_CORE),
}
SAMPLES = [
    Hello("token", peer="p"),
    Submit([EngineRequest(id="r", prompt_ids=b"\1\0\0\0", sampling=SamplingParams(seed=1, logit_bias={3: 1.0}))]),
    Abort(["a", "b"]),
    CalledTools(["a"]),
    frames.Vocabulary([b"a", b"b"], {0: "<s>"}),
    frames.Step([], frames.EngineLoad(running=1)),
    messages.Grant("t", 1, [{0: 1}]),
    messages.BlocksWritten(1, [(0, 1)]),
    TO_CORE.methods["responses.get"].request(1, "account", "id", True),
    TO_HTTP_WORKER.methods["news.worker_left"].request(0, "e0", "it hangs"),
    rpc.Failed(1, Overloaded("full", retry_after_s=1).info()),
]
UNREADABLE = {
    "not UTF-8": b"\x82\xa4type\xa5hello\xa5token\xa2\xff\xff",
    "nested": b"\x83\xa4type\xa5hello\xa5token\xa1a\xa1x" + b"\x91" * 60_000 + b"\xc0",
    "a nested argument": b"\x93\xa9core.find\x01" + b"\x91" * 60_000 + b"\xc0",
    "a list of four billion": b"\x82\xa4type\xa5abort\xa3ids\xdd\xff\xff\xff\xff",
    "empty": b"",
}


@st.composite
def mutated(draw):
    """A valid message with a few bytes replaced, removed or inserted."""
    payload = bytearray(msgspec.msgpack.encode(draw(st.sampled_from(SAMPLES))))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(payload)))
        payload[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
    return bytes(payload)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
@settings(max_examples=n_examples(1000), deadline=None)
@given(payload=st.binary(max_size=200) | mutated())
def test_every_byte_string_is_a_message_or_a_frame_error(decoder, payload):
    with contextlib.suppress(FrameError):
        assert isinstance(frames.decode(decoder, payload), msgspec.Struct)


@pytest.mark.parametrize("payload", UNREADABLE.values(), ids=UNREADABLE)
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_malformed_payloads_are_frame_errors(decoder, payload):
    with pytest.raises(FrameError, match="unreadable frame"):
        frames.decode(decoder, payload)


@settings(max_examples=n_examples(100), deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_frames_are_split_alike_however_the_bytes_arrive(payloads, sizes):
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    buffer, found = FrameBuffer(), []
    for n in sizes:
        found += buffer.feed(stream[:n])
        stream = stream[n:]
    assert [*found, *buffer.feed(stream)] == payloads
    assert not buffer.has_partial_frame


def test_a_small_limit_applies_to_the_first_frame_only():
    hello, large = frames.encode(Hello("a")), frames.encode(Abort(["x" * 5000]))
    buffer = FrameBuffer(frames.MAX_HELLO_BYTES)
    payloads = buffer.feed(hello + large)
    assert next(payloads) == hello[4:]
    buffer.max_bytes = frames.MAX_FRAME_BYTES
    assert next(payloads) == large[4:]
    with pytest.raises(FrameError, match="at most 4096"):
        list(FrameBuffer(frames.MAX_HELLO_BYTES).feed(large))
