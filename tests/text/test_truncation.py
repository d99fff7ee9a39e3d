"""Prompts that are cut to a number of tokens keep their system message and what was said last."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.protocol.request import GenerateRequest, Message
from emberline.protocol.token_ids import count, unpack
from emberline.text.prompt import build_prompt
from emberline.text.truncation import truncate_prompt
from tests.examples import n_examples
from tests.text.chats import family

CHATS = ("chatml", "reasoning", "plain", "llama3", "gemma", "phi", "llama2")
TURNS = [
    Message("user" if n % 2 == 0 else "assistant", " ".join(f"w{n}-{word}" for word in range(20))) for n in range(9)
]


def request_of(*messages: Message) -> GenerateRequest:
    return GenerateRequest(id="r", model="m", messages=messages)


@pytest.mark.parametrize("name", CHATS)
def test_the_oldest_turns_leave_first(name: str) -> None:
    model = family(name)
    whole = build_prompt(model, request_of(*TURNS)).n_ids
    for most in (whole - 1, whole // 2):
        ids = truncate_prompt(model, request_of(*TURNS), most).ids
        kept = next(n for n in range(2, 10, 2) if build_prompt(model, request_of(*TURNS[n:])).n_ids <= most)
        assert ids == build_prompt(model, request_of(*TURNS[kept:])).ids


def test_the_system_message_stays_and_of_a_long_question_the_end() -> None:
    model = family("chatml")
    question = Message("user", " ".join(f"word{n}" for n in range(400)) + " What is it?")
    messages = (Message("system", "Be kind."), *TURNS[:2], question)
    ids = truncate_prompt(model, request_of(*messages), 80).ids
    assert count(ids) == 80
    detokenizer = model.detokenizer(b"")
    text = detokenizer.push(unpack(ids)) + detokenizer.finish()
    assert "Be kind." in text
    assert text.index("word399 What is it?") > text.index("Be kind.")
    assert "word1 " not in text
    assert ids.endswith(build_prompt(model, request_of(Message("user", "x"))).ids[-12:]), "the assistant's turn begins"


@settings(max_examples=n_examples(40))
@given(
    messages=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=60)), min_size=1),
    most=st.integers(4, 200),
)
def test_a_prompt_never_has_more_tokens(messages: list[tuple[str, str]], most: int) -> None:
    model = family("chatml")
    request = request_of(*(Message(role, text) for role, text in messages))  # type: ignore[arg-type]
    assert count(truncate_prompt(model, request, most).ids) <= most
    raw = GenerateRequest(id="r", model="m", prompt="".join(text for _, text in messages) or "x")
    assert count(truncate_prompt(model, raw, most).ids) <= most
