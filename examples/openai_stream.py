"""A streamed chat completion through OpenAI's client. Run `emberline serve`, then: python examples/openai_stream.py"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686") + "/v1",
    api_key=os.environ.get("EMBERLINE_KEY", "none"),
)

stream = client.chat.completions.create(
    model="@cf/huggingfacetb/smollm2-135m-instruct",
    messages=[{"role": "user", "content": "Write two lines about a lighthouse."}],
    max_tokens=64,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage:  # the last chunk, which has no choices
        print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")
