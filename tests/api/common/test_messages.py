import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.api.common.chat_messages import CalledFunction, ChatMessage, ToolCallField, canonical_messages
from tests.api.adversarial import cpu_s

ids = st.sampled_from(["a", "b", "c"]) | st.none()
names = st.sampled_from(["f", "g"])
calls = st.builds(lambda id, name: ToolCallField(id=id, function=CalledFunction(name, "{}")), ids, names)
turns = st.builds(lambda made: ChatMessage(role="assistant", tool_calls=made), st.lists(calls, max_size=5))
results = st.builds(lambda id, name: ChatMessage(role="tool", tool_call_id=id, name=name), ids, names | st.none())


@given(st.lists(turns | results, min_size=1, max_size=12))
def test_a_result_answers_the_first_call_that_it_can_mean(messages: list[ChatMessage]) -> None:
    unanswered = []
    for message in canonical_messages(messages):
        if message.role == "assistant":
            unanswered = list(message.tool_calls)
            continue
        given = messages.pop(0)
        while given.role != "tool":
            given = messages.pop(0)
        wanted = given.tool_call_id
        meant = [call for call in unanswered if (call.id == wanted if wanted else given.name in (None, call.name))]
        assert message.tool_call_id == (meant[0].id if meant else wanted)
        if meant:
            unanswered.remove(meant[0])


@pytest.mark.parametrize("with_ids", [True, False])
def test_pairing_takes_linear_time(with_ids: bool) -> None:
    n = 20_000
    fields = [ToolCallField(id=f"c{i}", function=CalledFunction("f", "{}")) for i in range(n)]
    answers = [ChatMessage(role="tool", tool_call_id=f"c{n - 1 - i}" if with_ids else None) for i in range(n)]
    assert cpu_s(lambda: canonical_messages([ChatMessage(role="assistant", tool_calls=fields), *answers])) < 2
