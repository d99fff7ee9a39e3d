"""Usage as OpenAI's and Cloudflare's clients read it."""

from typing import Any

from emberline.protocol.events import Usage


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def total(usages: list[Usage]) -> Usage:
    """Several requests' usage as one."""
    cached: dict[str, int] = {}
    for usage in usages:
        for tier, tokens in usage.cached_by_tier.items():
            cached[tier] = cached.get(tier, 0) + tokens
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        cached_by_tier=cached,
    )
