import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol.request import Message, ToolCall
from emberline.text.prompt import TextHash, chain_digests, extend_digest

messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=st.text(max_size=5),
    name=st.none() | st.text(max_size=2),
    tool_calls=st.lists(st.builds(ToolCall, *[st.text(max_size=2)] * 3), max_size=2).map(tuple),
    tool_call_id=st.none() | st.text(max_size=2),
)


@given(st.lists(messages, max_size=4), st.lists(messages, max_size=4))
def test_conversations_share_digests_as_far_as_they_share_messages(one, other):
    ones, others = chain_digests(one), chain_digests(other)
    assert len(ones) == len(one)
    for n in range(min(len(one), len(other))):
        assert (ones[n] == others[n]) == (one[: n + 1] == other[: n + 1])


def test_a_reply_extends_the_chain():
    first, reply = Message("user", "hi"), Message("assistant", "hello")
    assert extend_digest(chain_digests([first])[-1], reply) == chain_digests([first, reply])[-1]


@pytest.mark.parametrize(("arguments", "same"), [('{"b": [1], "a":2}', True), ('{"a":2,"b":[2]}', False), ("{", False)])
def test_arguments_count_as_parsed(arguments, same):
    def digest(text):
        return chain_digests([Message("assistant", "", tool_calls=(ToolCall("1", "f", text),))])

    assert (digest('{"a":2,"b":[1]}') == digest(arguments)) is same


def test_template_arguments_root_the_chain():
    conversation = [Message("user", "hi")]
    thinking = chain_digests(conversation, {"enable_thinking": True})
    assert thinking != chain_digests(conversation)
    assert thinking == chain_digests(conversation, {"enable_thinking": True})


def test_lone_surrogates_have_a_digest():
    assert chain_digests([Message("user", "\ud800")]) != chain_digests([Message("user", "\ud801")])


@given(st.lists(st.text()))
def test_text_hashes_by_content_not_by_pieces(pieces):
    grown = TextHash()
    digest = grown.after("")
    for piece in pieces:
        digest = grown.after(piece)
    assert digest == TextHash().after("".join(pieces))


def test_fields_do_not_run_into_each_other():
    one, other = Message("user", "xny"), Message("user", "x", name="y")
    assert chain_digests([one]) != chain_digests([other])


def test_a_copied_text_hash_goes_its_own_way():
    first = TextHash()
    first.after("one ")
    second = first.copy()
    assert second == first
    assert second.n_chars == 4
    assert second.after("two") == TextHash().after("one two")
    assert first.after("three") == TextHash().after("one three")
    assert second != first
