"""OpenAI's Responses API: whole, streamed, stored, continued, in the background."""

from collections.abc import Iterator

from tests.golden.cases.common import LOCAL, LONG_STEPS, PARAMETERS, WEATHER_CALL
from tests.golden.exchange import Case, Client, one, whole_and_streamed

RESPONSES = "/v1/responses"
HI = {"model": LOCAL, "input": "Hi"}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}


def cases() -> Iterator[Case]:
    yield from whole_and_streamed("responses/local", RESPONSES, HI)
    yield from whole_and_streamed("responses/local-tool-call", RESPONSES, {**HI, "tools": [TOOL]}, say=WEATHER_CALL)
    thoughts = "<think>\nTwo towns.\n</think>\n\nOslo."
    yield from whole_and_streamed("responses/local-reasoning", RESPONSES, HI, say=thoughts)
    yield one("responses/local-not-stored", RESPONSES, {**HI, "store": False, "max_output_tokens": 3})
    yield from whole_and_streamed("responses/vllm", RESPONSES, {**HI, "model": "vllm-model"})
    yield from whole_and_streamed("responses/anthropic", RESPONSES, {**HI, "model": "anthropic/claude-opus-5"})
    yield from whole_and_streamed("responses/failing-down", RESPONSES, {**HI, "model": "down-model"})
    yield one("responses/count-tokens", f"{RESPONSES}/input_tokens", HI)
    yield one("responses/refused-unknown-model", RESPONSES, {**HI, "model": "nothing"})
    yield one("responses/refused-wrong-type", RESPONSES, {**HI, "input": 5})
    yield one("responses/web-search-ignored", RESPONSES, {**HI, "tools": [{"type": "web_search"}]})
    yield one("responses/refused-parent", RESPONSES, {**HI, "previous_response_id": "resp_nothing"})
    yield one("responses/unknown", f"{RESPONSES}/resp_nothing", method="GET")
    yield Case("responses/stored", _stored)
    yield Case("responses/continued", _continued)
    yield Case("responses/background", _background)
    yield Case("responses/background-streamed", _background_streamed)
    yield Case("responses/background-cancelled", _background_cancelled)


async def _stored(client: Client) -> None:
    made = await client.post(RESPONSES, {**HI, "metadata": {"a": "b"}, "instructions": "Be brief."}, say="Yes.")
    path = f"{RESPONSES}/{made['id']}"
    await client.get(path)
    await client.get(f"{path}/input_items")
    await client.post(f"{path}/cancel")
    await client.send("DELETE", path)
    await client.get(path)


async def _continued(client: Client) -> None:
    first = await client.post(RESPONSES, HI, say="First.")
    body = {"model": LOCAL, "input": "And now?", "previous_response_id": first["id"], "stream": True}
    await client.post(RESPONSES, body)


async def _background(client: Client) -> None:
    """How far the response is when it is accepted depends on the machine, so that the first reply is not recorded."""
    made = await client.post(RESPONSES, {**HI, "background": True}, say="Later.", record=False)
    await client.until(f"{RESPONSES}/{made['id']}", lambda found: found["status"] == "completed")


async def _background_streamed(client: Client) -> None:
    events = await client.post(RESPONSES, {**HI, "background": True, "stream": True}, say="Later on.")
    response_id = events[0]["data"]["response"]["id"]
    path = f"{RESPONSES}/{response_id}"
    await client.get(f"{path}?stream=true")
    after = f"{path}?stream=true&starting_after="
    await client.get(f"{after}{len(events) - 3}", shown_path=f"{after}<all but two>")


async def _background_cancelled(client: Client) -> None:
    """The client leaves after the first token, which ends nothing, and cancels during the second one."""
    body = {**HI, "background": True, "stream": True}
    events = await client.leave(RESPONSES, body, after="Later", say="Later", script=LONG_STEPS)
    path = f"{RESPONSES}/{events[0]['data']['response']['id']}"
    await client.send("POST", f"{path}/cancel", record=False)  # it may show how long the queue is
    await client.get(f"{path}?stream=true")
    await client.until(path, lambda found: found["status"] == "cancelled" and "queue" not in found)
    await client.billed()
