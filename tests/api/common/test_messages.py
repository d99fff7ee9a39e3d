import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.api.common.chat_messages import CalledFunction, ChatMessage, ToolCallField, canonical_messages
from emberline.protocol.errors import BadInput
from emberline.protocol.request import ContentPart, Message
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


KEPT = {"type": "ephemeral"}
PARTS = [
    {"type": "text", "text": "See:", "cache_control": KEPT},
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}, "cache_control": KEPT},
    {"type": "image_url", "image_url": "data:image/png;base64,AA=="},
    {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "refusal", "refusal": "No."},
]


def decoded(*messages: dict[str, object]) -> list[ChatMessage]:
    return msgspec.convert(list(messages), list[ChatMessage])


def test_parts_and_marks_are_kept_in_order() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "extra_content": {"google": {"x": "y"}}}
    turns = (
        {"role": "assistant", "content": None, "tool_calls": [call], "thinking_blocks": [{"type": "thinking"}]},
        {"role": "tool", "tool_call_id": "c", "content": PARTS, "cache_control": KEPT},
    )
    asked, result = canonical_messages(decoded(*turns), takes_media=True)
    assert (asked.marks, asked.tool_calls[0].marks) == (
        {"thinking_blocks": [{"type": "thinking"}]},
        {"extra_content": {"google": {"x": "y"}}},
    )
    assert (result.content, result.marks, result.n_media) == ("See:\nNo.", {"cache_control": KEPT}, 4)
    assert result.parts == (
        ContentPart("text", "See:", marks={"cache_control": KEPT}),
        ContentPart("image", "https://example.org/a.png", marks={"cache_control": KEPT}),
        ContentPart("image", "data:image/png;base64,AA=="),
        ContentPart("file", "data:application/pdf;base64,AA==", "a.pdf"),
        ContentPart("audio", "data:audio/wav;base64,AA=="),
        ContentPart("text", "No."),
    )


@pytest.mark.parametrize("part", [*PARTS[3:5], {"type": "video_url", "video_url": {"url": "data:,"}}])
def test_media_are_refused_where_only_text_is_taken(part: dict[str, object]) -> None:
    messages = decoded({"role": "user", "content": [PARTS[5], part]})
    with pytest.raises(BadInput) as refused:
        canonical_messages(messages)
    assert refused.value.param == "messages[0].content[1].type"
    assert refused.value.message.endswith("is not supported; only text and images are")


def test_images_keep_their_place_and_detail() -> None:
    detailed = {"type": "image_url", "image_url": {"url": "https://example.org/b.png", "detail": "low"}}
    (message,) = canonical_messages(decoded({"role": "user", "content": [PARTS[2], PARTS[0], detailed, PARTS[5]]}))
    assert (message.content, message.n_media) == ("See:\nNo.", 2)
    assert message.parts == (
        ContentPart("image", "data:image/png;base64,AA=="),
        ContentPart("text", "See:", marks={"cache_control": KEPT}),
        ContentPart("image", "https://example.org/b.png", detail="low"),
        ContentPart("text", "No."),
    )


@pytest.mark.parametrize("url", ["", "file:///etc/passwd", "ftp://a/b", "data:text/html;base64,AA==", "file-id:file-1"])
def test_other_urls_of_images_are_refused(url: str) -> None:
    messages = decoded({"role": "user", "content": [PARTS[5], {"type": "image_url", "image_url": {"url": url}}]})
    with pytest.raises(BadInput, match="https://") as refused:
        canonical_messages(messages)
    assert refused.value.param == "messages[0].content[1].image_url"


def test_a_message_of_plain_text_is_stored_as_before() -> None:
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = canonical_messages(decoded({"role": "user", "content": texts}))
    assert msgspec.json.encode(message) == b'{"role":"user","content":"a\\nb"}'
    stored = b'{"role":"user","content":"hi","images":["data:image/png;base64,AA=="]}'
    assert msgspec.json.decode(stored, type=Message) == Message("user", "hi")
