"""`emberline ps`: models, devices, KV cache and load of the server at the configured address."""

import argparse
import time
from typing import Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.server.address import ServerAddress

RATE_WINDOW_S = 1.0
add_arguments = common.add_client_options


def run(args: argparse.Namespace) -> int:
    address = ServerAddress.for_client(common.config_of(args))
    before, start_s = client.get(address, "/api/ps"), time.monotonic()
    time.sleep(RATE_WINDOW_S)
    now = client.get(address, "/api/ps")
    _add_rates(before, now, time.monotonic() - start_s)
    if args.json:
        common.print_json(now)
        return 0
    headings = ("MODEL", "WORKER", "ROLE", "DEVICE", "STATE", "RUNNING", "WAITING", "KV USED", "TOKENS/S")
    common.print_table([headings, *(_row(engine) for engine in now["engines"])])
    tiers = [_tier_row(engine, tier) for engine in now["engines"] for tier in engine["load"].get("tiers", ())]
    if tiers:
        print()
        common.print_table([("WORKER", "TIER", "STATE", "USED", "OF", "HIT RATIO", "READS", "OLDEST"), *tiers])
    drafts = [_draft_row(engine, stats) for engine in now["engines"] for stats in engine["load"].get("drafts", ())]
    if drafts:
        print()
        common.print_table([("WORKER", "DRAFTER", "DRAFTED", "ACCEPTED", "SHARE", "SHARE BY POSITION"), *drafts])
    unloaded = [model for model in now.get("model_states", ()) if model["state"] != "loaded"]
    if unloaded:
        print()
        common.print_table([("MODEL", "STATE", "MEMORY", ""), *(_unloaded_row(model) for model in unloaded)])
    return 0


def _add_rates(before: dict[str, Any], now: dict[str, Any], seconds: float) -> None:
    """Output tokens per second between two reports; a total that decreased belongs to a restarted worker."""
    totals = {engine["name"]: engine["load"]["output_tokens"] for engine in before["engines"]}
    for engine in now["engines"]:
        total = engine["load"]["output_tokens"]
        engine["output_tokens_per_s"] = round(max(0, total - totals.get(engine["name"], total)) / seconds, 1)


def _state(engine: dict[str, Any]) -> str:
    if engine.get("state") == "draining":
        return "draining" if engine["in_flight"] else "drained"
    return engine["problem"] or ("ok" if engine["ok"] else "down")


def _tier_row(engine: dict[str, Any], tier: dict[str, Any]) -> tuple[str, ...]:
    asked = tier.get("hits", 0) + tier.get("misses", 0)
    rate, oldest_s = tier.get("read_rate", 0.0), tier.get("oldest_s", 0.0)
    return (
        engine["name"],
        tier["name"],
        tier.get("state", "ok"),
        common.format_size(tier.get("used_bytes", 0)),
        common.format_size(tier.get("capacity_bytes", 0)),
        f"{100 * tier.get('hits', 0) / asked:.0f} %" if asked else "–",
        f"{common.format_size(int(rate))}/s" if rate else "–",
        common.format_duration(oldest_s) if oldest_s else "–",
    )


def _unloaded_row(model: dict[str, Any]) -> tuple[str, ...]:
    state = model["state"].replace("_", " ")
    return model["id"], state, f"about {common.format_size(model['memory_bytes'])}", model["reason"]


def _draft_row(engine: dict[str, Any], stats: list[Any]) -> tuple[str, ...]:
    """Return the table row of speculative decoding, with acceptance by position of a draft."""
    drafter, drafted, accepted = stats
    shares = [f"{100 * n / of:.0f} %" for n, of in zip(accepted[:8], drafted) if of]
    share = f"{100 * sum(accepted) / max(1, sum(drafted)):.0f} %"
    return engine["name"], drafter, str(sum(drafted)), str(sum(accepted)), share, " ".join(shares)


def _layout(engine: dict[str, Any]) -> str:
    """Describe the division of a worker of several ranks: "tp2 pp2, 4 ranks"."""
    return f"{engine['layout']}, {engine['ranks']} ranks" if engine.get("ranks", 1) > 1 else ""


def _row(engine: dict[str, Any]) -> tuple[str, ...]:
    load = engine["load"]
    used, total = load["kv_used_blocks"], load["kv_total_blocks"]
    return (
        engine["model"],
        engine["name"],
        engine.get("role", ""),
        " ".join(filter(None, (engine.get("device"), engine.get("backend"), _layout(engine)))),
        _state(engine),
        str(load["running"]),
        str(load["waiting"]),
        f"{100 * used / total:.0f} %" if total else "–",
        f"{engine['output_tokens_per_s']:.1f}",
    )
