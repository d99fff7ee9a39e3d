"""Servers' own accounts of their load, as an EngineLoad. What a server does not say, or says wrongly, is 0."""

import math
import re
from typing import Any

from emberline.protocol.frames import EngineLoad
from emberline.protocol.layout import BLOCK_TOKENS

_SAMPLE = re.compile(r"^vllm:(\w+)(?:\{([^}]*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_MOST = 1 << 40


class NoLoad(Exception):
    """The answer is no account of a load."""


def vllm_load(metrics: str) -> EngineLoad:
    """From /metrics; several engines behind one port are added up."""
    sums: dict[str, float] = {}
    fullness: list[float] = []
    blocks = 0
    for name, labels, value in _SAMPLE.findall(metrics):
        if name == "cache_config_info":
            blocks += _blocks(dict(_LABEL.findall(labels)))
        elif name == "kv_cache_usage_perc":
            fullness.append(_number(value))
        else:
            sums[name] = sums.get(name, 0.0) + _number(value)
    if "num_requests_running" not in sums:
        raise NoLoad("/metrics has no vllm:num_requests_running")
    used = max((share for share in fullness if 0 <= share <= 1), default=0.0)
    return EngineLoad(
        running=_count(sums["num_requests_running"]),
        waiting=_count(sums.get("num_requests_waiting", 0)),
        kv_used_blocks=int(used * blocks),
        kv_total_blocks=blocks,
        prompt_tokens=_count(sums.get("prompt_tokens_total", 0)),
        cached_tokens=_count(sums.get("prefix_cache_hits_total", 0)),
        output_tokens=_count(sums.get("generation_tokens_total", 0)),
        preemptions=_count(sums.get("num_preemptions_total", 0)),
    )


def sglang_load(answer: Any) -> EngineLoad:
    """From /v1/loads: one entry per data-parallel rank, added up."""
    told = answer.get("loads", [answer]) if isinstance(answer, dict) else answer
    listed = told if isinstance(told, list) else ()
    ranks = [rank for rank in listed if isinstance(rank, dict) and "num_running_reqs" in rank]
    if not ranks:
        raise NoLoad("/v1/loads has no num_running_reqs")

    def total(name: str) -> int:
        return sum(_count(rank.get(name)) for rank in ranks)

    return EngineLoad(
        running=total("num_running_reqs"),
        waiting=total("num_waiting_reqs"),
        waiting_tokens=total("num_waiting_uncached_tokens"),
        kv_used_blocks=total("num_used_tokens") // BLOCK_TOKENS,
        kv_total_blocks=total("max_total_num_tokens") // BLOCK_TOKENS,
    )


def _blocks(labels: dict[str, str]) -> int:
    n_blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    return int(n_blocks) * int(size) // BLOCK_TOKENS if n_blocks.isdecimal() and size.isdecimal() else 0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _count(value: Any) -> int:
    """A number that counts something; NaN, negative and absurd ones are lies and count as none."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return 0
    return int(value) if 0 <= value < _MOST else 0
