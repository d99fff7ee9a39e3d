"""`emberline tune`: propose settings for the traffic of the last day, and write them into emberline.toml.

Reads the usage of the store and what the running workers have measured of their steps, drafts and tiers, replays the
busiest part of the time through the simulator, and tells the predicted gain with its uncertainty. Changes nothing
without `--apply`, and then only the file: the server takes the new settings when it is started again.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from emberline.accounts.recorded_usage import UsageRecord, recorded_usage
from emberline.balancer.step_capacity import mean_cost
from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.config_edit import difference, edited, replace_file
from emberline.config import FILE_NAME, Config
from emberline.engine.memory import free_host_bytes
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import DraftStats, EngineLoad, TierStats
from emberline.server.address import ServerAddress
from emberline.service.service_factory import DATABASE
from emberline.simulator.coefficients import Coefficients
from emberline.simulator.experiment import SLO_TPOT_S, SLO_TTFT_S
from emberline.simulator.recorded_traffic import RecordedRow, build_recorded_trace, busiest
from emberline.simulator.tuning import (
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    Outcome,
    Proposal,
    Setting,
    TunedFleet,
    Tuner,
    measured_model,
)

DAY_S = 86_400.0
MIN_REQUESTS = 50  # fewer say little about the traffic


class Worker(msgspec.Struct, kw_only=True):
    """A worker in `/api/ps`, as far as it is needed here."""

    model: str
    ok: bool = True
    role: str = "both"
    layout: str = ""
    context_len: int = 8192
    kv_tokens: int = 0
    kv_token_bytes: float = 0.0
    max_running: int = 64
    device: str = "cpu"
    load: EngineLoad


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="MODEL", help="whose workers and traffic (default: the one with the most tokens)")
    add("--hours", type=float, default=24.0, metavar="H", help="of recorded usage that is read (default 24)")
    add("--window", type=float, default=1800.0, metavar="S", help="of it that is replayed, the busiest (default 1800)")
    add("--ttft", type=float, default=SLO_TTFT_S, metavar="S", help=f"target at p90 (default {SLO_TTFT_S:g})")
    add("--itl", type=float, default=SLO_TPOT_S, metavar="S", help=f"target at p90 (default {SLO_TPOT_S:g})")
    add("--apply", action="store_true", help="write the proposed settings into emberline.toml, and keep a backup")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    if min(args.hours, args.window, args.ttft, args.itl) <= 0:
        raise BadInput("--hours, --window, --ttft and --itl must be above 0")
    config = common.config_of(args)
    status = client.get(ServerAddress.for_client(config), "/api/ps")
    records = recorded_usage(config.store.url or config.home / DATABASE, int((time.time() - args.hours * 3600) * 1e6))
    workers = [msgspec.convert(each, Worker) for each in status["engines"] if "kv_tokens" in each]
    model = args.model or _most_used(records, {worker.model for worker in workers})
    workers = [worker for worker in workers if worker.model == model and worker.ok]
    rows = [_row(record) for record in records if record.model == model]
    if not workers:
        raise BadInput(f"no worker serves {model}: `emberline ps` shows the models that are loaded")
    if len(rows) < MIN_REQUESTS:
        raise BadInput(f"{len(rows)} requests of {model} were recorded, too few to tune for: {MIN_REQUESTS} or more")
    fleet = _fleet(workers, args.ttft, args.itl)
    window = busiest(rows, args.window)
    trace = build_recorded_trace(window, fleet.models[workers[0].layout].context_len)
    tuner = Tuner(trace, fleet, None if args.json else _tell)
    proposal = tuner.propose(_present(workers, config, fleet))
    changes = _changes(proposal, workers)
    if args.json:
        common.print_json(_document(model, window, fleet, proposal, changes))
    else:
        _print(model, rows, window, fleet, proposal)
    if args.apply:
        _apply(config, changes if proposal.is_worth_it else {})
    elif changes and proposal.is_worth_it and not args.json:
        print("\n`emberline tune --apply` shows the change of emberline.toml and makes it.")
    return 0


def _most_used(records: Sequence[UsageRecord], served: set[str]) -> str:
    used = dict.fromkeys(served, 0)
    for record in records:
        if record.model in used:
            used[record.model] += record.input_tokens + record.output_tokens
    if not used:
        raise BadInput("no engine worker is connected: `emberline ps` tells why")
    return max(used, key=lambda model: used[model])


def _row(record: UsageRecord) -> RecordedRow:
    first_us = record.first_token_us
    return RecordedRow(
        account=record.account,
        session=record.session,
        arrival_s=record.created_us / 1e6,
        first_token_s=None if first_us is None else first_us / 1e6,
        end_s=record.finished_us / 1e6,
        input_tokens=record.input_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
    )


def _fleet(workers: Sequence[Worker], ttft_s: float, itl_s: float) -> TunedFleet:
    cost = mean_cost([each.load.step_cost for each in workers if each.load.step_cost is not None])
    if cost is None:
        raise BadInput("no worker has measured enough steps yet: let the server work for a while, then ask again")
    first = workers[0]
    kv_bytes = max(1, int(first.kv_token_bytes))
    model = measured_model(
        cost,
        Coefficients(
            name=first.model,
            source="",
            step_s=0.0,
            row_s=0.0,
            context_s=0.0,
            token_s=0.0,
            pair_s=0.0,
            kv_tokens=min(each.kv_tokens for each in workers),
            kv_bytes=kv_bytes,
            max_running=first.max_running,
            token_budget=512 if first.device == "cpu" else 8192,
            context_len=min(first.context_len, min(each.kv_tokens for each in workers) - 256),
            paced=first.device != "cpu",
        ),
    )
    tiers = {tier.name: tier for worker in workers for tier in worker.load.tiers}
    host_bytes = 0 if first.device == "cpu" else free_host_bytes() // 2 // len(workers)
    rates = {name: tier.read_rate for name, tier in tiers.items() if tier.read_rate}
    return TunedFleet(
        models={first.layout: model},
        workers={first.layout: len(workers)},
        accepted=_acceptance([stats for worker in workers for stats in worker.load.drafts]),
        max_host_tokens=(host_bytes + _capacity(tiers, "host")) // kv_bytes,
        max_disk_tokens=2 * _capacity(tiers, "disk") // kv_bytes,
        host_bytes_per_s=rates.get("host", HOST_BYTES_PER_S),
        disk_bytes_per_s=rates.get("disk", DISK_BYTES_PER_S),
        ttft_s=ttft_s,
        itl_s=itl_s,
    )


def _capacity(tiers: dict[str, TierStats], name: str) -> int:
    return tiers[name].capacity_bytes if name in tiers else 0


def _acceptance(drafts: Sequence[DraftStats]) -> list[float]:
    """By position of a draft: the probability that it is accepted, and all before it are."""
    n_drafts = sum(stats.drafted[0] for stats in drafts if stats.drafted)
    depth = max((len(stats.accepted) for stats in drafts), default=0)
    accepted = [sum(stats.accepted[n] for stats in drafts if n < len(stats.accepted)) for n in range(depth)]
    return [n / n_drafts for n in accepted] if n_drafts else []


def _present(workers: Sequence[Worker], config: Config, fleet: TunedFleet) -> Setting:
    kv_bytes = fleet.models[workers[0].layout].kv_bytes
    tiers = {tier.name: tier for tier in workers[0].load.tiers}
    drafted = sum(sum(stats.drafted) for each in workers for stats in each.load.drafts)
    n_drafts = sum(stats.drafted[0] for each in workers for stats in each.load.drafts if stats.drafted)
    return Setting(
        layout=workers[0].layout,
        prefill_workers=sum(worker.role == "prefill" for worker in workers),
        token_budget=config.engine.token_budget,
        draft_tokens=min(len(fleet.accepted), round(drafted / n_drafts)) if n_drafts else 0,
        host_tokens=_capacity(tiers, "host") // kv_bytes,
        disk_tokens=_capacity(tiers, "disk") // kv_bytes,
    )


def _changes(proposal: Proposal, workers: Sequence[Worker]) -> dict[tuple[str, str], int | str]:
    """Keys of emberline.toml that differ between the present setting and the proposed one."""
    now, best, n_workers = proposal.now.setting, proposal.best.setting, len(workers)
    kv_bytes = max(1, int(workers[0].kv_token_bytes))
    found: dict[tuple[str, str], int | str] = {}
    if best.prefill_workers != now.prefill_workers:
        n_prefill = best.prefill_workers
        found["engine", "prefill_workers"] = n_prefill
        found["engine", "decode_workers"] = n_workers - n_prefill if n_prefill else 0
        found["engine", "replicas"] = 0 if n_prefill else n_workers
    if best.token_budget != now.token_budget:
        found["engine", "token_budget"] = best.token_budget
    if bool(best.draft_tokens) != bool(now.draft_tokens):
        found["engine", "speculation"] = "auto" if best.draft_tokens else "off"
    if best.host_tokens != now.host_tokens:
        found["kv", "host_bytes"] = best.host_tokens * kv_bytes
    if best.disk_tokens != now.disk_tokens:
        found["kv", "disk_bytes"] = best.disk_tokens * kv_bytes
    return found


def _apply(config: Config, changes: dict[tuple[str, str], int | str]) -> None:
    if not changes:
        print("\nNothing to change: no other setting is better by more than what is uncertain about it.")
        return
    path = config.home / FILE_NAME
    before = path.read_text() if path.exists() else ""
    after = edited(before, changes)
    print(f"\n{difference(path, before, after)}")
    backup = replace_file(path, after)
    kept = f" The version before is {backup}." if backup is not None else ""
    print(f"\nWritten.{kept} Start the server again to use it; flags and EMBERLINE_* variables still come first.")


# --- what is printed -------------------------------------------------------------------------------------------------


def _tell(outcome: Outcome) -> None:
    print(f"  simulated {_describe(outcome.setting)}: strain {outcome.strain:.2f}", file=sys.stderr, flush=True)


def _describe(setting: Setting) -> str:
    roles = f"{setting.prefill_workers} prefill" if setting.prefill_workers else "no separate prefill"
    parts = [roles, f"token budget {setting.token_budget or 'default'}"]
    parts += [f"{setting.draft_tokens} drafts"] if setting.draft_tokens else []
    parts += [f"{name} {n:,} tokens" for name, n in (("host", setting.host_tokens), ("disk", setting.disk_tokens)) if n]
    return ", ".join(parts)


def _print(
    model: str, rows: Sequence[RecordedRow], window: Sequence[RecordedRow], fleet: TunedFleet, found: Proposal
) -> None:
    cost = next(iter(fleet.models.values()))
    ttft, itl = ([value for row in window if (value := getattr(row, name)) is not None] for name in ("ttft_s", "itl_s"))
    print(f"{model}: {len(rows):,} requests recorded, {len(window):,} of them replayed; step times {cost.source}")
    print(f"measured then: p90 TTFT {_p90(ttft):.2f} s, p90 inter-token latency {1e3 * _p90(itl):.0f} ms")
    lines = [("", "SETTING", "P90 TTFT", "P90 ITL", "HIT RATIO", "BUSY", "STRAIN")]
    for title, each in (("now", found.now), ("proposed", found.best)):
        figures = f"{each.ttft_p90_s:.2f} s", f"{1e3 * each.itl_p90_s:.0f} ms", f"{each.hit_ratio:.2f}"
        lines.append((title, _describe(each.setting), *figures, f"{each.busy:.0%}", f"{each.strain:.2f}"))
    common.print_table(lines)
    verdict = "" if found.is_worth_it else ": no clear gain, so nothing is proposed"
    print(f"predicted gain {found.gain:.0%} ± {found.uncertainty:.0%} (95 %, over parts of the time){verdict}")
    print("(strain: the larger of p90 TTFT and p90 inter-token latency, each divided by its target)")


def _p90(values: list[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))] if values else 0.0


def _document(
    model: str, window: Sequence[RecordedRow], fleet: TunedFleet, found: Proposal, changes: dict[tuple[str, str], Any]
) -> dict[str, Any]:
    return {
        "model": model,
        "requests": len(window),
        "step_cost": msgspec.to_builtins(next(iter(fleet.models.values()))),
        "now": msgspec.to_builtins(found.now),
        "best": msgspec.to_builtins(found.best),
        "gain": found.gain,
        "uncertainty": found.uncertainty,
        "worth_it": found.is_worth_it,
        "changes": {f"{section}.{key}": value for (section, key), value in changes.items()},
    }
