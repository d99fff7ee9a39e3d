"""Usage as servers write it, in three dialects: read for our books, and written with the cached tokens of prefill."""

from typing import Any

import msgspec

from emberline.protocol.events import Usage

_MOST_TOKENS = 1 << 31


def usage_objects(answer: Any) -> list[dict[str, Any]]:
    """Every usage object of an answer or of one stream event: at its top, or in its message or response."""
    if not isinstance(answer, dict):
        return []
    places = (answer, answer.get("message"), answer.get("response"))
    found = [place.get("usage") for place in places if isinstance(place, dict)]
    return [usage for usage in found if isinstance(usage, dict)]


def read_usage(usage: dict[str, Any]) -> Usage:
    """A server may write anything: what is no sensible number counts as 0."""
    if "prompt_tokens" in usage or "input_tokens" not in usage:
        prompt, details = _count(usage.get("prompt_tokens")), usage.get("prompt_tokens_details")
        output = _count(usage.get("completion_tokens"))
        thought = usage.get("completion_tokens_details")
    elif _is_responses(usage):
        prompt, details = _count(usage.get("input_tokens")), usage.get("input_tokens_details")
        output, thought = _count(usage.get("output_tokens")), usage.get("output_tokens_details")
    else:  # Anthropic's: what came from the cache is not in input_tokens
        read, written = _count(usage.get("cache_read_input_tokens")), _count(usage.get("cache_creation_input_tokens"))
        prompt = _count(usage.get("input_tokens")) + read + written
        return _usage(prompt, read, _count(usage.get("output_tokens")), 0)
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    reasoning = _count(thought.get("reasoning_tokens")) if isinstance(thought, dict) else 0
    return _usage(prompt, cached, output, reasoning)


def write_cached(usage: dict[str, Any], cached: int) -> None:
    """Put prefill's cached tokens where the dialect has them, always: decode's own number is worth nothing."""
    if "prompt_tokens" in usage or "input_tokens" not in usage:
        cached = min(cached, _count(usage.get("prompt_tokens")))
        usage["prompt_tokens_details"] = _with_cached(usage.get("prompt_tokens_details"), cached)
    elif _is_responses(usage):
        cached = min(cached, _count(usage.get("input_tokens")))
        usage["input_tokens_details"] = _with_cached(usage.get("input_tokens_details"), cached)
    else:
        total = _count(usage.get("input_tokens")) + _count(usage.get("cache_read_input_tokens"))
        usage["cache_read_input_tokens"] = min(cached, total)
        usage["input_tokens"] = total - min(cached, total)


def cached_of(body: bytes) -> int:
    """The cached tokens of a whole answer; what does not say counts as 0."""
    try:
        answer = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return 0
    return max((read_usage(usage).cached_tokens for usage in usage_objects(answer)), default=0)


def _is_responses(usage: dict[str, Any]) -> bool:
    return "input_tokens_details" in usage or "total_tokens" in usage


def _with_cached(details: Any, cached: int) -> dict[str, Any]:
    return {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}


def _usage(prompt: int, cached: int, output: int, reasoning: int) -> Usage:
    tiers = {"device": min(cached, prompt)} if cached else {}
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=output,
        reasoning_tokens=min(reasoning, output),
        cached_by_tier=tiers,
    )


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < _MOST_TOKENS else 0
