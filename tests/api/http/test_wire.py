"""The top level of a body is read once, and what is decoded of it later is what decoding the whole body would give."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.api.http.wire import MAX_VALUES, SESSION_FIELDS, Wire, decode
from emberline.api.openai.upstream_passthrough import PassthroughChat, PassthroughCompletion
from emberline.protocol.errors import BadInput, EmberlineError, TooLarge
from tests.examples import n_examples

CHAT = msgspec.json.Decoder(PassthroughChat)
COMPLETION = msgspec.json.Decoder(PassthroughCompletion)
MESSAGES = [{"role": "user", "content": "Hi"}]

_scalars = st.none() | st.booleans() | st.integers(-5, 10**6) | st.text(max_size=5)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
_names = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "temperature", "stop", "stream", "n", "tools", "logit_bias"),
        *("response_format", "guided_json", "seed", "user", "kv_transfer_params", "chat_template", "unknown", "é"),
    ]
)


def outcome(read: Any, *arguments: Any) -> Any:
    try:
        found = msgspec.structs.asdict(read(*arguments))
    except EmberlineError as error:
        return type(error), error.message, error.param
    return {name: bytes(value) if isinstance(value, msgspec.Raw) else value for name, value in found.items()}


@settings(max_examples=n_examples(200), deadline=None)
@given(st.dictionaries(_names, _values), st.booleans(), st.sampled_from([CHAT, COMPLETION]))
def test_fields_are_decoded_as_of_the_whole_body(fields: Any, is_likely: bool, decoder: Any) -> None:
    if is_likely:
        fields = {"model": "m", "messages": MESSAGES, "prompt": "Hi", **fields}
    raw = json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")
    assert outcome(Wire(raw).decode_fields, decoder) == outcome(decode, raw, decoder)


def test_whole_numbers_may_be_written_as_floats() -> None:
    body = Wire(json.dumps({"model": "m", "messages": MESSAGES, "max_tokens": 8.0}).encode()).decode_fields(CHAT)
    assert (body.max_tokens, json.loads(bytes(body.messages))) == (8, MESSAGES)


def test_the_last_of_two_equal_names_counts() -> None:
    wire = Wire(b'{"model":"a","messages":[],"n":1,"m\\u006fdel":"b","messages":[1],"n":2}')
    body = wire.decode_fields(CHAT)
    assert (wire.model, body.model, body.n, bytes(body.messages)) == ("b", "b", 2, b"[1]")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "no body"),
        (b"[1]", "must be an object"),
        (b'{"model":"m","n":NaN}', "not valid JSON"),
        (b'{"model":"m","messages":[' + b"[" * 9000 + b"]" * 9000 + b"]}", "nested too deeply"),
        (b'{"model":"m","messages":[{"content":"\xff"}]}', "not valid UTF-8"),
        (b'{"model":"m","messages":[],"unknown":"\xff"}', "not valid UTF-8"),
        (b'{"model":5,"messages":[]}', "`model` must be a string"),
        (b'{"model":"m"}', "`messages` is missing"),
    ],
)
def test_a_body_that_cannot_be_read(raw: bytes, problem: str) -> None:
    with pytest.raises(BadInput, match=problem):
        Wire(raw).decode_fields(CHAT)


def test_a_body_of_too_many_fields_is_not_taken_apart() -> None:
    raw = b'{"model":"m",' + b",".join(b'"%d":0' % number for number in range(MAX_VALUES + 1)) + b"}"
    wire = Wire(raw)
    assert (wire.fields, wire.model) == ({}, None)  # so that the size is reported, and no unknown model
    with pytest.raises(TooLarge):
        wire.decode_fields(CHAT)


@pytest.mark.parametrize(
    ("fields", "names", "session"),
    [
        ({"user": "u"}, SESSION_FIELDS, "u"),
        ({"user": "u", "prompt_cache_key": "k"}, SESSION_FIELDS, "k"),
        ({"user": "u", "prompt_cache_key": ""}, SESSION_FIELDS, "u"),
        ({"user": "u", "prompt_cache_key": 7}, SESSION_FIELDS, "u"),
        ({"metadata": {"user_id": "a"}}, ("metadata",), "a"),
        ({"metadata": {"user_id": 5}}, ("metadata",), None),
        ({"metadata": None}, ("metadata",), None),
        ({"metadata": "a"}, ("metadata",), None),
        ({"user": {"user_id": "a"}}, SESSION_FIELDS, None),
        ({}, SESSION_FIELDS, None),
    ],
)
def test_the_session_of_a_body(fields: Any, names: tuple[str, ...], session: str | None) -> None:
    assert Wire(json.dumps(fields).encode()).session(names) == session


def test_a_model_by_another_name() -> None:
    wire = Wire(b'{"model":"m", "messages": [ 1 ], "unknown":1e400}')
    wire.use_model("a/m")
    assert wire.raw == b'{"model":"a/m","messages":[ 1 ],"unknown":1e400}'
    assert wire.model == "a/m"
