"""Prompts whose tokens a client asks for: everything in them counts for the limit and for the event loop."""

from typing import Any

import pytest

from emberline.protocol.errors import TooLarge
from emberline.protocol.request import GenerateRequest, Message, Tool, ToolCall
from emberline.service.prepare import MAX_COUNTED_CHARS, check_countable

HI = Message("user", "Hi")


def filled(text: str) -> list[GenerateRequest]:
    """Requests that have the text in different places."""
    places: list[dict[str, Any]] = [
        {"prompt": text},
        {"messages": (Message("user", text),)},
        {"messages": (HI, Message("assistant", "", tool_calls=(ToolCall("a", "f", text),)))},
        {"messages": (HI, Message("assistant", "Hi", reasoning=text))},
        {"messages": (HI,), "tools": (Tool("f", text, {}),)},
    ]
    return [GenerateRequest(id="a", model="m", **place) for place in places]


def test_every_text_of_a_prompt_counts() -> None:
    for request in filled("x" * 1000):
        assert 1000 <= check_countable(request) < 1100
    for request in filled("x" * (MAX_COUNTED_CHARS + 1)):
        with pytest.raises(TooLarge, match=f"at most {MAX_COUNTED_CHARS:,} characters"):
            check_countable(request)
