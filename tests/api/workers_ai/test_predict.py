"""Inputs and outputs of predictors: options of a call, and files, whose types end up in a header."""

import base64

import msgspec
import pytest

from emberline.api.workers_ai.predict import from_data_url, read_file, read_predict_input
from emberline.catalog.model_card import CogSource
from emberline.protocol.errors import BadInput, Unsupported
from emberline.protocol.gateway import GatewayOptions


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("image/png", "image/png"),
        ("", "application/octet-stream"),
        ("text/html\r\nset-cookie: a=b", "application/octet-stream"),
        ("é/x", "application/octet-stream"),
        ("html", "application/octet-stream"),
    ],
)
def test_the_type_of_a_file_is_a_type(kind: str, expected: str) -> None:
    assert from_data_url(f"data:{kind};base64,eA==") == (expected, b"x")


def test_a_file_is_read_in_pieces() -> None:
    data = bytes(range(256)) * (12 << 10)  # three pieces
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    output = msgspec.json.encode(url)
    for n_bytes in (len(output), 1 << 20, (1 << 20) + 1, (1 << 20) + 2, len(output) - 1):
        content_type, parts = read_file([output[at : at + n_bytes] for at in range(0, len(output), n_bytes)])
        assert (content_type, b"".join(parts)) == ("image/png", data)
    for text in ("data:,", "data:image/png;base64,eA==", "data:a/b;base64,e\nA==", "data:a/b;base64,eA ==", "data:"):
        content_type, parts = read_file([msgspec.json.encode(text)])
        assert (content_type, b"".join(parts)) == from_data_url(text)
    with pytest.raises(Unsupported, match="not in base64"):
        read_file([b'"data:a/b;base64,x"'])


def test_options_of_a_prediction() -> None:
    predictor = CogSource(version=1, digest="", input={"properties": {"text": {"type": "string"}}}, output={})
    asked = {"gateway": {"id": "strict", "skipCache": True}, "rejectIfBusy": True, "queueRequest": True}
    body = read_predict_input(msgspec.json.encode({"text": "a", "options": asked}), predictor)
    assert body.options.gateway == GatewayOptions(id="strict", skip_cache=True), "its guardrails must see the input"
    assert body.for_queue
    assert body.to_request("id", None, "@me/x").reject_if_busy
    for wrong in ([], {"gateway": "strict"}, {"gateway": {"id": 3}}, {"rejectIfBusy": "yes"}):
        with pytest.raises(BadInput, match="`options` cannot be read"):
            read_predict_input(msgspec.json.encode({"text": "a", "options": wrong}), predictor)
