"""An agent: the model calls tools, their results go back, five times; streamed. Every call is valid by construction.

Run `emberline serve`, then: pip install openai; python examples/agent.py
"""

import json
import os
from typing import Any

from openai import OpenAI

URL = os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686")
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
FILES = {"notes.txt": "Buy bread.\nCall Ada.", "todo.txt": "1. Water the plants.", "log.txt": "All is well."}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the project and return its text.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": sorted(FILES)}, "first_line": {"type": "integer", "minimum": 1}},
                "required": ["path", "first_line"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find the files of the project that contain a word.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "minLength": 1, "maxLength": 20}},
                "required": ["word"],
            },
        },
    },
]


def run_tool(name: str, arguments: dict[str, Any]) -> str:
    if name == "read_file":
        return "\n".join(FILES[arguments["path"]].splitlines()[arguments["first_line"] - 1 :])
    found = [path for path, text in FILES.items() if arguments["word"].lower() in text.lower()]
    return ", ".join(found) or "no file"


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("EMBERLINE_KEY", "none"))
    messages: list[Any] = [
        {"role": "system", "content": "You look after a small project. Use the tools to find out what is in it."},
        {"role": "user", "content": "What do I have to do today?"},
    ]
    for turn in range(1, 6):
        with client.chat.completions.stream(
            model=MODEL,
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0.8,
            seed=turn,
            max_tokens=80,
            stream_options={"include_usage": True},
            extra_headers={"x-session-affinity": "examples-agent"},
        ) as stream:
            reply = stream.get_final_completion()
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        message = reply.choices[0].message
        (call,) = message.tool_calls or []
        result = run_tool(call.function.name, json.loads(call.function.arguments))
        cached = reply.usage.prompt_tokens_details.cached_tokens
        print(f"turn {turn}: {call.function.name}{call.function.arguments} → {result!r}")
        print(f"        {reply.usage.prompt_tokens} tokens in, {cached} of them from the cache")
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    main()
