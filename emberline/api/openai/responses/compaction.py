"""Compaction: a conversation in fewer tokens, as items that are the input of the next response.

The model that holds the conversation summarizes it, as the next turn, so that its cached prefix is used. What the user,
the system and the developer said is kept as it is. Everything else is replaced by one item with the summary.
"""

from collections.abc import Sequence

import msgspec

from emberline.api.openai.responses.items import CompactionItem, Item, MessageItem, item_id, seal
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import Internal
from emberline.protocol.request import GenerateRequest, Message, Reasoning, ToolChoice

MAX_SUMMARY_TOKENS = 4096
_TASK = (
    "Summarize our conversation up to here. Your summary will replace all of it except my own messages, and you will "
    "continue from it. Keep what later steps need: the goals, what was decided, facts with their exact values (names, "
    "paths, numbers, code), what the tools returned, and what is still to be done. Write only the summary."
)


def summary_request(request: GenerateRequest) -> GenerateRequest:
    """The request that continues the conversation of `request` with its summary."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=MAX_SUMMARY_TOKENS, stop=(), logprobs=None)
    return msgspec.structs.replace(
        request,
        messages=(*(request.messages or ()), Message("user", _TASK)),
        sampling=sampling,
        tool_choice=ToolChoice("none"),
        output=None,
        reasoning=Reasoning(enabled=False),
    )


def compacted(items: Sequence[Item], answer: Answer, key: str) -> list[Item]:
    """The items that replace `items`: those that no model wrote, then the summary."""
    summary = answer.choices[0].text.strip()
    if not summary:
        raise Internal("the model wrote no summary: try again, or continue with the whole conversation")
    kept: list[Item] = [item for item in items if isinstance(item, MessageItem) and item.role != "assistant"]
    return [*kept, CompactionItem(id=item_id("compaction", key, "o0"), encrypted_content=seal(summary))]
