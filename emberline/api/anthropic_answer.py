"""A whole message as Anthropic's clients read it."""

from typing import Any

from emberline.api.call import Call
from emberline.api.collect import arguments_of
from emberline.protocol.answer import Answer, Choice, Part, Said, Thought
from emberline.protocol.events import ChoiceDone, Usage

# Clients send a thought back only with its signature. Ours signs nothing: what comes back is the caller's own word.
SIGNATURE = "ZW1iZXJsaW5l"


def usage_body(usage: Usage) -> dict[str, Any]:
    """Anthropic counts apart what came from the cache: the prompt is the sum of all input fields."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return body


def stop_reason(choice: Choice | ChoiceDone) -> str:
    if choice.finish == "length":
        return "max_tokens"
    if choice.finish == "tool_calls":
        return "tool_use"
    return "end_turn" if choice.stop_sequence is None else "stop_sequence"


def head(call: Call, model: str) -> dict[str, Any]:
    return {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": model}


def message_body(call: Call, model: str, answer: Answer, hides_thinking: bool = False) -> dict[str, Any]:
    choice = answer.choices[0]
    blocks = [_block(part, hides_thinking) for part in choice.parts]
    return {
        **head(call, model),
        "content": [block for block in blocks if block] or [{"type": "text", "text": ""}],
        "stop_reason": stop_reason(choice),
        "stop_sequence": choice.stop_sequence,
        "usage": usage_body(answer.usage),
    }


def _block(part: Part, hides_thinking: bool) -> dict[str, Any] | None:
    if isinstance(part, Said):
        return {"type": "text", "text": part.text}
    if isinstance(part, Thought):
        return {"type": "thinking", "thinking": "" if hides_thinking else part.text, "signature": SIGNATURE}
    arguments = arguments_of(part)
    if arguments is None:
        return None
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments}
