"""Events of streams in a form that does not depend on how many tokens the engine gave at a time.

Successive deltas of the same part of a reply are merged into one, so that a golden file compares what a client has
in the end and in which order its parts came, not how the network cut them.
"""

import contextlib
import copy
import json
from typing import Any

Json = Any

# Where the APIs have the text of a delta.
TEXT_PATHS = (
    ("choices", 0, "delta", "content"),
    ("choices", 0, "delta", "reasoning_content"),
    ("choices", 0, "delta", "reasoning"),
    ("choices", 0, "delta", "tool_calls", 0, "function", "arguments"),
    ("choices", 0, "text"),
    ("delta",),
    ("delta", "text"),
    ("delta", "thinking"),
    ("delta", "partial_json"),
    ("message", "content"),
    ("message", "thinking"),
    ("tool_calls", 0, "function", "arguments"),
    ("response",),
    ("candidates", 0, "content", "parts", 0, "text"),
)
# Fields that number events or fill them up. Numbers are checked, then both are dropped.
NUMBERS = ("sequence_number", "id")  # the second one of a resumable stream's events, where it is a number
PADDING = ("obfuscation", "p")


def parse_events(text: str) -> list[Json]:
    """The server-sent events of a body: data as JSON where it is JSON, alone if the event has no name and no id."""
    return [event for block in text.replace("\r\n", "\n").split("\n\n") if (event := _event(block))]


def _event(block: str) -> Json:
    fields: dict[str, Any] = {}
    for line in filter(None, block.split("\n")):
        if line.startswith(":"):  # a comment, which keeps the connection alive
            continue
        name, _, value = line.partition(":")
        fields[name] = fields[name] + "\n" + value[1:] if name in fields else value.removeprefix(" ")
    if "data" in fields:
        with contextlib.suppress(ValueError):
            fields["data"] = json.loads(fields["data"])
    return fields["data"] if list(fields) == ["data"] else fields


def merge_deltas(events: list[Json]) -> list[Json]:
    """The events, with successive deltas that differ only in their text merged. Their numbers must count up by one."""
    for name in NUMBERS:
        numbers = [number for event in events if (number := _number(event, name)) is not None]
        assert not numbers or numbers == list(range(numbers[0], numbers[0] + len(numbers))), numbers
    merged: list[Json] = []
    for event in map(_plain, events):
        if merged and (joined := _joined(merged[-1], event)) is not None:
            merged[-1] = joined
        else:
            merged.append(event)
    return merged


def _payload(event: Json) -> dict[str, Any]:
    data = event.get("data", event) if isinstance(event, dict) else event
    return data if isinstance(data, dict) else {}


def _number(event: Json, name: str) -> int | None:
    """The number of an event: a field of its data, or the id of its server-sent event."""
    value = event.get(name) if isinstance(event, dict) and "data" in event else None
    value = _payload(event).get(name) if value is None else value
    return int(value) if str(value).isdecimal() else None


def _plain(event: Json) -> Json:
    event = copy.deepcopy(event)
    for part in (event, _payload(event)):
        for name in (*NUMBERS, *PADDING):
            if isinstance(part, dict) and (name in PADDING or str(part.get(name)).isdecimal()):
                part.pop(name, None)
    if "created_at" in _payload(event):  # of each line of Ollama's streams
        _payload(event)["created_at"] = "<time>"
    return event["data"] if isinstance(event, dict) and list(event) == ["data"] else event


def _joined(one: Json, other: Json) -> Json | None:
    """Both deltas as one; None if they are not deltas of the same part."""
    for path in TEXT_PATHS:
        first, second = _at(one, path), _at(other, path)
        if isinstance(first, str) and isinstance(second, str) and _put(one, path, "") == _put(other, path, ""):
            return _put(one, path, first + second)
    return None


def _at(event: Json, path: tuple[str | int, ...]) -> Json:
    found: Json = _payload(event)
    for step in path:
        try:
            found = found[step]
        except (KeyError, IndexError, TypeError):
            return None
    return found


def _put(event: Json, path: tuple[str | int, ...], text: str) -> Json:
    event = copy.deepcopy(event)
    target: Json = _payload(event)
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = text
    return event
