"""Bodies that the cases of several APIs share."""

from typing import Any

Json = Any
LOCAL = "smollm2"
HELLO = [{"role": "user", "content": "Hello there."}]
PARAMETERS = {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS},
}
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Oslo"}}\n</tool_call>'

# The engine computes the end of a reply of one token for so long that what the client does next reaches it meanwhile.
LONG_STEPS = "itl_ms=3000"


def chat(model: str) -> dict[str, Json]:
    """A chat of one message."""
    return {"model": model, "messages": HELLO}
