from emberline.api.openai.responses.items import FunctionCall, MessageItem, ReasoningItem, ReasoningText, to_messages
from emberline.protocol.request import Message, ToolCall
from tests.api.adversarial import cpu_s


def test_items_of_one_reply_are_one_message() -> None:
    items = [
        ReasoningItem(content=[ReasoningText("I think")]),
        MessageItem(role="assistant", content="Let me look."),
        FunctionCall(call_id="a", name="f", arguments="{}"),
        FunctionCall(call_id="b", name="g", arguments="{}"),
        MessageItem(role="user", content="Go on."),
        MessageItem(role="assistant", content="One."),
        MessageItem(role="assistant", content="Two."),
    ]
    messages, fields = to_messages(items, [f"input[{i}]" for i in range(len(items))])
    calls = (ToolCall("a", "f", "{}"), ToolCall("b", "g", "{}"))
    assert messages == [
        Message("assistant", "Let me look.", tool_calls=calls, reasoning="I think"),
        Message("user", "Go on."),
        Message("assistant", "One."),
        Message("assistant", "Two."),
    ]
    assert fields == ["input[0]", "input[4]", "input[5]", "input[6]"]


def test_joining_takes_linear_time() -> None:
    n = 30_000
    items = [FunctionCall(call_id=f"c{i}", name="f", arguments="{}") for i in range(n)]
    assert cpu_s(lambda: to_messages(items, ["input"] * n)) < 2
