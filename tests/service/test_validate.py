from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol import token_ids as tokens
from emberline.protocol.errors import BadInput
from emberline.protocol.request import GenerateRequest, Message, SamplingParams
from emberline.service.validation import validate, validate_sampling

VOCAB = 100
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("temperature", [0, 0.5, 5], [-0.1, 5.1, NAN, INF]),
        ("top_p", [0.01, 1], [0, -1, 1.01, NAN]),
        ("top_k", [0, 1, 1 << 20], [-1, 1 << 40]),
        ("min_p", [0, 1], [-0.1, 1.1, NAN]),
        ("repetition_penalty", [0.1, 2], [0, -1, 2.1, NAN]),
        ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, NAN]),
        ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, -INF]),
        ("logprobs", [None, 0, 20], [-1, 21]),
        ("max_tokens", [None, 0, 1, 1 << 30], [-1, 1 << 60]),
        ("min_tokens", [0, 3], [-1]),
        ("logit_bias", [{}, {0: -100, 99: 100}], [{100: 0}, {-1: 0}, {1: 101}, {1: NAN}, {1: -INF}]),
        ("stop", [(), ("x",), ("y" * 256,) * 16], [("",), ("y" * 257,), ("x",) * 17]),
        ("seed", [None, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1]),
    ],
)
def test_ranges(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        validate_sampling(SamplingParams(**{field: value}), VOCAB)
    for value in bad:
        with pytest.raises(BadInput) as refused:
            validate_sampling(SamplingParams(**{field: value}), VOCAB)
        assert refused.value.param == field


def test_combinations() -> None:
    with pytest.raises(BadInput, match="1024 entries"):
        validate_sampling(SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)), 2000)
    with pytest.raises(BadInput) as refused:
        validate_sampling(SamplingParams(max_tokens=3, min_tokens=4), VOCAB)
    assert refused.value.param == "min_tokens"
    with pytest.raises(BadInput) as refused:
        validate_sampling(SamplingParams(stop_ids=(VOCAB,)), VOCAB)
    assert refused.value.param == "stop_token_ids"


@given(st.integers(-(2**63), 2**63 - 1))
def test_every_int64_is_a_seed_of_its_own(seed: int) -> None:
    mapped = validate_sampling(SamplingParams(seed=seed), VOCAB).seed
    assert mapped is not None
    assert 0 <= mapped < 2**64
    assert (mapped if mapped < 2**63 else mapped - 2**64) == seed


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", **fields)


def test_exactly_one_prompt() -> None:
    messages = (Message("user", "hi"),)
    validate(request(messages=messages), VOCAB)
    validate(request(prompt=""), VOCAB)
    validate(request(prompt_ids=tokens.pack([0, VOCAB - 1])), VOCAB)
    for fields in ({}, {"messages": messages, "prompt": "x"}, {"prompt": "x", "prompt_ids": b""}):
        with pytest.raises(BadInput, match="exactly one"):
            validate(request(**fields), VOCAB)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": ()}, "messages"),
        ({"prompt_ids": b"\0\0\0"}, "prompt"),
        ({"prompt_ids": tokens.pack([1, VOCAB])}, "prompt"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "n": 17}, "n"),
        ({"prompt": "x", "deadline_s": 0.0}, "deadline_s"),
        ({"prompt": "x", "deadline_s": NAN}, "deadline_s"),
        ({"prompt": "x", "deadline_s": INF}, "deadline_s"),
    ],
)
def test_the_request_itself(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadInput) as refused:
        validate(request(**fields), VOCAB)
    assert refused.value.param == param
