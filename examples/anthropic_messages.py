"""Anthropic's Messages through its client. Run `emberline serve`, then: python examples/anthropic_messages.py"""

import os

from anthropic import Anthropic
from anthropic.types import MessageParam

MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"
SYSTEM = "You answer in one short sentence."
MESSAGES: list[MessageParam] = [{"role": "user", "content": "What is a harbour for?"}]

client = Anthropic(
    base_url=os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686"),
    api_key=os.environ.get("EMBERLINE_KEY", "none"),
)

counted = client.messages.count_tokens(model=MODEL, system=SYSTEM, messages=MESSAGES)
print(f"{counted.input_tokens} tokens will go in")

message = client.messages.create(model=MODEL, system=SYSTEM, messages=MESSAGES, max_tokens=64)
print("".join(block.text for block in message.content if block.type == "text"))

with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=64) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print(f"\n{stream.get_final_message().usage}")
