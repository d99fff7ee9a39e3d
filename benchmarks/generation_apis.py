"""The APIs that generate, for benchmarks that ask each of them for the same: a tool call, or JSON of a schema."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

Json = dict[str, Any]


class Refused(Exception):
    """The server answered with 400."""


class Wrong(Exception):
    """An answer that must not be."""


@dataclass(frozen=True)
class Ask:
    """One request. `forced`: the reply must be a tool call. None: a field is left out."""

    model: str
    prompt: str
    max_tokens: int
    tools: tuple[Json, ...] = ()  # name, description, parameters
    forced: bool = False
    schema: Json | None = None
    temperature: float | None = None
    seed: int | None = None


@dataclass
class Got:
    """A reply. The arguments of a call are JSON, as the client would parse it."""

    text: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    n_tokens: int = 0

    def begin(self, name: str, arguments: str = "") -> None:
        self.calls.append((name, arguments))

    def more(self, arguments: str, at: int = -1) -> None:
        name, before = self.calls[at]
        self.calls[at] = name, before + arguments


@dataclass(frozen=True)
class GenerationApi:
    name: str
    path: str  # with `{model}` where the path names the model
    body: Callable[[Ask], Json]
    whole: Callable[[Json], Got]
    streamed: Callable[[Iterable[Json]], Got]
    forces_calls: bool = True  # it has a `tool_choice`
    stream_fields: Json = field(default_factory=dict)  # of a body whose reply is streamed

    async def ask(self, client: httpx.AsyncClient, ask: Ask, *, stream: bool) -> Got:
        """Raises Refused or Wrong."""
        path, body = self.path.format(model=ask.model), self.body(ask) | {"stream": stream}
        body |= self.stream_fields if stream else {}
        reply = await client.post(path, json=body)
        if reply.status_code == 400:
            raise Refused(reply.text[:500])
        if reply.status_code != 200:
            raise Wrong(f"status {reply.status_code}: {reply.text[:300]}")
        return self.streamed(_events(reply.text)) if stream else self.whole(reply.json())


def _events(text: str) -> Iterable[Json]:
    """The events of a stream: `data:` lines, or one object per line."""
    for line in text.splitlines():
        data = line.removeprefix("data:").strip()
        if data.startswith("{"):
            event: Json = json.loads(data)
            if event.get("error") or event.get("type") == "error":
                raise Wrong(f"an error in the stream: {data[:300]}")
            yield event


def _functions(ask: Ask) -> list[Json]:
    return [{"type": "function", "function": tool} for tool in ask.tools]


def _messages(ask: Ask) -> list[Json]:
    return [{"role": "user", "content": ask.prompt}]


def _some(**fields: Any) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


# --- chat completions -------------------------------------------------------------------------------------------------


def _chat_body(ask: Ask) -> Json:
    body = _some(temperature=ask.temperature, seed=ask.seed) | {"messages": _messages(ask)}
    body |= {"model": ask.model, "max_tokens": ask.max_tokens}
    if ask.tools:
        body |= {"tools": _functions(ask), "tool_choice": "required" if ask.forced else "auto"}
    if ask.schema is not None:
        envelope = {"name": "record", "schema": ask.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": envelope}
    return body


def _chat_whole(reply: Json) -> Got:
    choice = reply["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = [(function["name"], function["arguments"]) for function in functions]
    text = choice["message"].get("content") or ""
    return Got(text, calls, choice["finish_reason"], reply["usage"]["completion_tokens"])


def _chat_streamed(events: Iterable[Json]) -> Got:
    got = Got()
    for event in events:
        for choice in event["choices"]:
            got.text += choice["delta"].get("content") or ""
            _add_calls(got, choice["delta"].get("tool_calls") or ())
            got.finish = choice["finish_reason"] or got.finish
        got.n_tokens = (event.get("usage") or {}).get("completion_tokens", got.n_tokens)
    return got


def _add_calls(got: Got, parts: Iterable[Json]) -> None:
    for part in parts:
        if part["index"] == len(got.calls):
            got.begin(part["function"]["name"])
        got.more(part["function"].get("arguments") or "", part["index"])


# --- Responses --------------------------------------------------------------------------------------------------------


def _responses_body(ask: Ask) -> Json:
    body = _some(temperature=ask.temperature) | {"input": ask.prompt, "store": False}
    body |= {"model": ask.model, "max_output_tokens": ask.max_tokens}
    if ask.tools:
        functions = [{"type": "function", "strict": False, **tool} for tool in ask.tools]
        body |= {"tools": functions, "tool_choice": "required" if ask.forced else "auto"}
    if ask.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "record", "schema": ask.schema, "strict": True}}
    return body


def _responses_whole(reply: Json) -> Got:
    got = Got(finish=reply["status"], n_tokens=reply["usage"]["output_tokens"])
    for item in reply["output"]:
        if item["type"] == "function_call":
            got.begin(item["name"], item["arguments"])
        elif item["type"] == "message":
            got.text += "".join(part["text"] for part in item["content"])
    return got


def _responses_streamed(events: Iterable[Json]) -> Got:
    got = Got()
    for event in events:
        match event["type"]:
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                got.begin(event["item"]["name"])
            case "response.function_call_arguments.delta":
                got.more(event["delta"])
            case "response.output_text.delta":
                got.text += event["delta"]
            case "response.completed" | "response.incomplete":
                got.finish = event["response"]["status"]
                got.n_tokens = event["response"]["usage"]["output_tokens"]
    return got


# --- Anthropic's messages ---------------------------------------------------------------------------------------------


def _anthropic_body(ask: Ask) -> Json:
    most = None if ask.temperature is None else min(ask.temperature, 1.0)  # as the API has it
    body = _some(temperature=most) | {"messages": _messages(ask)}
    body |= {"model": ask.model, "max_tokens": ask.max_tokens}
    if ask.tools:
        rows = [{"name": tool["name"], "description": tool["description"]} for tool in ask.tools]
        body["tools"] = [row | {"input_schema": tool["parameters"]} for row, tool in zip(rows, ask.tools, strict=True)]
        body["tool_choice"] = {"type": "any" if ask.forced else "auto"}
    if ask.schema is not None:
        body["output_config"] = {"format": {"type": "json_schema", "schema": ask.schema}}
    return body


def _anthropic_whole(reply: Json) -> Got:
    got = Got(finish=reply["stop_reason"], n_tokens=reply["usage"]["output_tokens"])
    for block in reply["content"]:
        if block["type"] == "tool_use":
            got.begin(block["name"], json.dumps(block["input"]))
        elif block["type"] == "text":
            got.text += block["text"]
    return got


def _anthropic_streamed(events: Iterable[Json]) -> Got:
    got = Got()
    for event in events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                got.begin(event["content_block"]["name"])
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                got.more(event["delta"]["partial_json"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                got.text += event["delta"]["text"]
            case "message_delta":
                got.finish, got.n_tokens = event["delta"]["stop_reason"], event["usage"]["output_tokens"]
    return got


# --- Workers AI -------------------------------------------------------------------------------------------------------


def _run_body(ask: Ask) -> Json:
    body = _chat_body(ask)
    del body["model"]
    if ask.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": ask.schema}
    return body


def _run_whole(reply: Json) -> Got:
    result = reply["result"]
    calls = [(call["name"], json.dumps(call["arguments"])) for call in result.get("tool_calls") or ()]
    text = result["response"]
    text = text if isinstance(text, str) else json.dumps(text) if text is not None else ""
    return Got(text, calls, result.get("finish_reason", "stop"), result["usage"]["completion_tokens"])


def _run_streamed(events: Iterable[Json]) -> Got:
    got = Got(finish="stop")
    for event in events:
        got.text += event.get("response") or ""
        _add_calls(got, event.get("tool_calls") or ())
        got.finish = event.get("finish_reason") or got.finish
        got.n_tokens = (event.get("usage") or {}).get("completion_tokens", got.n_tokens)
    return got


# --- Ollama -----------------------------------------------------------------------------------------------------------


def _ollama_body(ask: Ask) -> Json:
    options = _some(temperature=ask.temperature, seed=ask.seed) | {"num_predict": ask.max_tokens}
    body: Json = {"model": ask.model, "messages": _messages(ask), "options": options}
    if ask.tools:
        body["tools"] = _functions(ask)
    return body | ({} if ask.schema is None else {"format": ask.schema})


def _ollama_whole(reply: Json) -> Got:
    return _ollama_streamed([reply])


def _ollama_streamed(events: Iterable[Json]) -> Got:
    got = Got()
    for event in events:
        got.text += event["message"].get("content") or ""
        for call in event["message"].get("tool_calls") or ():
            got.begin(call["function"]["name"], json.dumps(call["function"]["arguments"]))
        got.finish = event.get("done_reason") or got.finish
        got.n_tokens = event.get("eval_count", got.n_tokens)
    return got


RUN_PATH = "/client/v4/accounts/local/ai/run/{model}"
APIS = {
    api.name: api
    for api in (
        GenerationApi(
            "chat",
            "/v1/chat/completions",
            _chat_body,
            _chat_whole,
            _chat_streamed,
            stream_fields={"stream_options": {"include_usage": True}},
        ),
        GenerationApi("responses", "/v1/responses", _responses_body, _responses_whole, _responses_streamed),
        GenerationApi("anthropic", "/v1/messages", _anthropic_body, _anthropic_whole, _anthropic_streamed),
        GenerationApi("run", RUN_PATH, _run_body, _run_whole, _run_streamed),
        GenerationApi("ollama", "/api/chat", _ollama_body, _ollama_whole, _ollama_streamed, forces_calls=False),
    )
}
