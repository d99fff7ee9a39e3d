"""Structured output: an answer that is always a valid object of your own class.

Run `emberline serve`, then: pip install openai; python examples/structured_output.py
"""

import os
from typing import Literal

from openai import OpenAI
from pydantic import BaseModel, Field

URL = os.environ.get("EMBERLINE_URL", "http://127.0.0.1:8686")
MODEL = "@cf/huggingfacetb/smollm2-135m-instruct"


class Ticket(BaseModel):
    title: str = Field(max_length=60)
    priority: Literal["low", "normal", "high"]
    affected: list[str] = Field(min_length=1, max_length=3)


def main() -> None:
    client = OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("EMBERLINE_KEY", "none"))
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "The login page and the search crash for everybody. Write a ticket."}],
        response_format=Ticket,
        temperature=0,
        max_tokens=120,
    )
    print(answer.choices[0].message.parsed)


if __name__ == "__main__":
    main()
