"""A chat completion through OpenAI's client. Run `emberline serve`, then: python examples/openai_chat.py"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686") + "/v1",
    api_key=os.environ.get("EMBERLINE_KEY", "none"),
)

reply = client.chat.completions.create(
    model="@cf/huggingfacetb/smollm2-135m-instruct",
    messages=[
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    max_tokens=64,
    temperature=0,
)
print(reply.choices[0].message.content)
print(reply.usage)
