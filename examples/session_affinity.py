"""Session affinity: each turn of an agent's conversation finds the previous one in the prefix cache.

Run `emberline serve`, then: python examples/session_affinity.py
"""

import json
import os
import urllib.request
import uuid
from typing import Any

URL = os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686")
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
SYSTEM = "You are a patient guide to a small town by the sea. " * 12
QUESTIONS = ("Where can I eat?", "And where can I sleep?", "What is the weather like?", "How do I get home?")


def chat(messages: list[dict[str, str]], session: str) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "max_tokens": 48, "temperature": 0}
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {os.environ.get('EMBERLINE_KEY', 'none')}",
        "x-session-affinity": session,  # the same for every turn of one conversation
    }
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        reply: dict[str, Any] = json.load(response)
    return reply


def main() -> None:
    session = str(uuid.uuid4())
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": question})
        reply = chat(messages, session)
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        print(f"turn {turn}: {usage['prompt_tokens']} tokens in, {cached} of them from the cache")
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


if __name__ == "__main__":
    main()
