"""`emberline cluster plan` and `emberline cluster bounds`: what the planner saw, did and why, and between which bounds.

emberline cluster plan [--model MODEL] [--dry-run] [--max 4]
emberline cluster bounds MODEL [--min 0] [--max 4] [--idle-s 600]
"""

import argparse
from typing import Any
from urllib.parse import quote

import msgspec

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.config import ScalingConfig
from emberline.protocol.errors import BadInput
from emberline.server.address import ServerAddress

_BOUNDS = (  # flag, key, placeholder, type, help
    ("--min", "min_replicas", "N", int, "replicas at least; 0: none while it is idle"),
    ("--max", "max_replicas", "N", int, "replicas at most"),
    ("--tolerated-s", "tolerated_s", "SECONDS", float, "that a prompt may be queued"),
    ("--grow-after-s", "grow_after_s", "SECONDS", float, "that there must be too few, before one is started"),
    ("--shrink-after-s", "shrink_after_s", "SECONDS", float, "that there must be too many, before one is drained"),
    ("--settle-s", "settle_s", "SECONDS", float, "between two drains or role changes"),
    ("--idle-s", "idle_s", "SECONDS", float, "without a request, before the last replica is drained (--min 0)"),
    ("--start-s", "start_s", "SECONDS", float, "that a replica takes to start, until it was measured"),
    ("--hold-s", "hold_s", "SECONDS", float, "that a request waits for a first replica"),
    ("--max-held", "max_held", "N", int, "requests that wait so, at each core"),
)


def add_arguments(actions: Any) -> None:
    plan = actions.add_parser("plan", help="explain what the planner saw, did and why", allow_abbrev=False)
    plan.add_argument("--model", default="", metavar="MODEL", help="only this one")
    plan.add_argument("--limit", type=int, default=10, metavar="N", help="decisions to show of each (default 10)")
    plan.add_argument("--dry-run", action="store_true", help="decide anew, with the bounds given; nothing is done")
    _add_bounds(plan)
    common.add_client_options(plan)
    bounds = actions.add_parser("bounds", help="between how many replicas a model is scaled", allow_abbrev=False)
    bounds.add_argument("model", metavar="MODEL", help="as `emberline ps` shows it")
    _add_bounds(bounds)
    bounds.add_argument("--reset", action="store_true", help="use those of the configuration again")
    common.add_client_options(bounds)


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    for flag, key, metavar, kind, text in _BOUNDS:
        parser.add_argument(flag, dest=key, metavar=metavar, type=kind, help=text)
    split = "prefill and decode on replicas of their own"
    parser.add_argument("--disaggregated", action=argparse.BooleanOptionalAction, default=None, help=split)


def run(address: ServerAddress, args: argparse.Namespace) -> int:
    return _bounds(address, args) if args.action == "bounds" else _plan(address, args)


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    keys = [*(key for _, key, *_ in _BOUNDS), "disaggregated"]
    return {key: getattr(args, key) for key in keys if getattr(args, key) is not None}


def _bounds(address: ServerAddress, args: argparse.Namespace) -> int:
    changes = _changes(args)
    if args.reset and changes:
        raise BadInput("--reset goes without other bounds")
    if args.reset or changes:
        body = {"model": args.model, "bounds": None if args.reset else changes}
        bounds = client.post(address, "/api/cluster/bounds", body)["bounds"]
    else:
        bounds = _models(address, args.model, 0)[0]["bounds"]
    if args.json:
        common.print_json({"model": args.model, "bounds": bounds})
    elif bounds is None:
        print(f"{args.model} is not scaled any more")
    else:
        common.print_table([(key, _text(value)) for key, value in bounds.items()])
    return 0


def _models(address: ServerAddress, model: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(address, f"/api/cluster/plan?model={quote(model)}&limit={limit}")["models"]
    return found


def _plan(address: ServerAddress, args: argparse.Namespace) -> int:
    changes = _changes(args)
    if changes and not args.dry_run:
        raise BadInput("bounds are for --dry-run here; `emberline cluster bounds` sets them")
    models = _models(address, args.model, args.limit)
    if args.dry_run:
        models = [_decided_anew(model, changes) for model in models]
    if args.json:
        common.print_json({"models": models})
        return 0
    if not models:
        print("No model is scaled: `emberline cluster bounds MODEL --max N` begins to.")
    for number, model in enumerate(models):
        if number:
            print()
        _show(model, args.dry_run)
    return 0


def _decided_anew(model: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return the plan that a planner would make if the last observation lasted."""
    from emberline.supervisor.cluster.planner import bounds_of
    from emberline.supervisor.cluster.scaling_plan import ScalingObservation
    from emberline.supervisor.cluster.scaling_policy import ScalingPolicy

    if model["observation"] is None:
        return model
    try:
        bounds = msgspec.convert({**model["bounds"], **changes}, ScalingConfig)
    except msgspec.ValidationError as error:
        raise BadInput(str(error)) from None
    seen = msgspec.convert(model["observation"], ScalingObservation)
    policy = ScalingPolicy(model["model"], bounds_of(bounds))
    at_s = model["plan"]["at_s"]
    policy.decide(seen, at_s - max(bounds.shrink_after_s, bounds.grow_after_s))
    plan = msgspec.to_builtins(policy.decide(seen, at_s))
    return {**model, "bounds": msgspec.to_builtins(bounds), "plan": plan, "decisions": []}


def _show(model: dict[str, Any], is_dry_run: bool) -> None:
    bounds, plan = model["bounds"], model["plan"]
    print(f"{model['model']}: {bounds['min_replicas']} to {bounds['max_replicas']} replicas")
    if plan is None:
        print("  No core has planned it yet.")
        return
    planner = model["planner"]
    mode = " (dry run: nothing is done)" if planner["mode"] == "dry-run" else ""
    print(f"  seen {common.format_duration(model['age_s'])} ago by {planner['core']}{mode}")
    held, seen = model["observation"]["held_requests"], model["observation"]
    print(f"  queued: {plan['queued_tokens']} uncached tokens; held requests: {held}")
    for name, what in (("now", plan["demand"]), (f"in {seen['start_s']:.0f} s", plan["forecast"])):
        rates = f"{what['prefill_rate']:.0f} prompt and {what['decode_rate']:.0f} output tokens/s"
        print(f"  demand {name}: {rates}, {what['kv_tokens']:.0f} KV tokens")
    for role in plan["roles"]:
        load = "none runs" if role["load"] is None else f"load {role['load']:.2f}"
        counts = f"{role['running']} running, {role['starting']} starting, {role['draining']} draining"
        print(f"  role {role['role']}: {counts}; {load}")
    for each in plan["decisions"]:
        name = each["replica"] or each["gpu"] or "a replica"
        print(f"  {'would ' if is_dry_run or mode else ''}{each['action']} {name} ({each['role']}): {each['why']}")
    for why in plan["held"]:
        print(f"  not more: {why}")
    if model["decisions"]:
        print("  decisions:")
        rows = [("AGE", "ACTION", "REPLICA", "ROLE", "OUTCOME", "WHY")]
        common.print_table([*rows, *(_decision(each) for each in model["decisions"])])


def _decision(each: dict[str, Any]) -> tuple[str, ...]:
    outcome = each["outcome"] + (f" in {each['took_s']:.1f} s" if each["took_s"] else "")
    age = common.format_duration(each["age_s"])
    return age, each["action"], each["replica"] or "–", each["role"], outcome, each["why"]


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
