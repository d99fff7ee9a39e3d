"""What a request becomes for a server that is not our engine: fields it does not know are refused by name."""

import pytest

from emberline.protocol.errors import Unsupported
from emberline.protocol.request import GenerateRequest, Message, Speculation
from emberline.upstream.upstream_request import body_of, check_known


def asked(**more: object) -> GenerateRequest:
    return GenerateRequest(id="a", model="m", messages=(Message("user", "Hi"),), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["vllm", "sglang", "openai"])
def test_drafts_are_for_our_own_engines(kind: str) -> None:
    assert "speculation" not in body_of(asked(), kind)
    with pytest.raises(Unsupported, match="speculation"):
        body_of(asked(speculation=Speculation(report=True)), kind)


def test_fields_outside_the_api() -> None:
    check_known("top_k", "vllm")
    with pytest.raises(Unsupported, match="bad_words"):
        check_known("bad_words", "sglang")
