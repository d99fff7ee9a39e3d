"""Runs OpenAI's Agents SDK in its own environment: `python agents_sdk.py BASE_URL MODEL`; prints JSON."""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

asked: list[list[str]] = []


@function_tool
def weather(city: str, unit: str = "celsius") -> str:
    """The weather in a city."""
    asked.append([city, unit])
    return f"report on {city}: clear"


async def streamed(agent: Agent[Any], question: str) -> tuple[str, list[str]]:
    """(final output, types of the streamed events)"""
    run = Runner.run_streamed(agent, question)
    kinds = [event.data.type async for event in run.stream_events() if event.type == "raw_response_event"]
    return run.final_output, kinds


async def main(base_url: str, model: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    agent = Agent(name="a", instructions="Be kind.", model=OpenAIResponsesModel(model, client), tools=[weather])
    whole = await Runner.run(agent, "How is the weather in two cities?")
    follow_up = await Runner.run(agent, "And the other one?", previous_response_id=whole.last_response_id)
    text, kinds = await streamed(agent, "How is the weather in two cities?")
    result = {"whole": whole.final_output, "follow_up": follow_up.final_output, "streamed": text}
    print(json.dumps({**result, "kinds": kinds, "asked": asked}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
