"""`emberline top`: the running server, live: workers, load, queues, batches and requests in flight.

Shows `/api/status`, which the operator's pages show too. `q` or Ctrl-C leaves.
"""

import argparse
import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.terminal import printable
from emberline.protocol.errors import BadInput, EmberlineError
from emberline.server.address import ServerAddress

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

MAX_REQUESTS = 200
_BARS = "▁▂▃▄▅▆▇█"
_WIDE = 110  # columns from which on the tables have all their columns
_STYLES = {"decode": "green", "prefill": "yellow", "waiting": "red", "ready": "green", "down": "red", "stalled": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default 1)")
    common.add_client_options(parser)


def run(args: argparse.Namespace) -> int:
    if not 0.1 <= args.interval <= 3600:
        raise BadInput("--interval must be between 0.1 and 3600 seconds")
    watch = Watch(ServerAddress.for_client(common.config_of(args)))
    if args.json:
        common.print_json(watch.update())
        return 0
    from rich.console import Console

    console = Console()
    if args.once or not sys.stdout.isatty():
        watch.update()
        console.print(frame(watch, console.width, None))
        return 0
    return _live(watch, console, args.interval)


def _live(watch: "Watch", console: Any, interval_s: float) -> int:
    from rich.live import Live

    watch.update()  # an error before the screen is taken over is an ordinary one
    with _key_presses() as pressed, Live(screen=True, console=console, auto_refresh=False) as live:
        while True:
            live.update(frame(watch, console.width, console.height), refresh=True)
            if pressed(interval_s) in ("q", "Q", "\x1b"):
                return 0
            with contextlib.suppress(EmberlineError):  # shown in the frame; the next poll may succeed
                watch.update()


@contextlib.contextmanager
def _key_presses() -> Iterator[Callable[[float], str]]:
    """A function that waits so long for a key and returns it, or an empty string."""
    if not sys.stdin.isatty():

        def sleep(seconds: float) -> str:
            time.sleep(seconds)
            return ""

        yield sleep
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield lambda seconds: sys.stdin.read(1) if select.select([sys.stdin], [], [], seconds)[0] else ""
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


class Watch:
    """The last status, the hour of points, and rates between polls."""

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self.status: dict[str, Any] = {}
        self.problem = ""  # of the last poll
        self.rates: dict[str, float] = {}  # output tokens per second, by worker
        self.series: dict[str, list[Any]] = {}

    def update(self) -> dict[str, Any]:
        since_s = self.series["time_s"][-1] if self.series.get("time_s") else 0
        query = f"/api/status?requests={MAX_REQUESTS}&recent=0&since={since_s}"
        try:
            found: dict[str, Any] = client.get(self.address, query)
        except EmberlineError as error:
            self.problem = error.message
            raise
        self.problem = ""
        before, self.status = self.status, found
        for name, points in found["series"].items():
            self.series[name] = [*self.series.get(name, ()), *points][-360:]
        self.rates = token_rates(before, found)
        return {**found, "series": self.series}

    def last(self, name: str) -> Any:
        """The newest point of the series that was measured within the last minute."""
        points = [point for point in self.series.get(name, [])[-6:] if point is not None]
        return points[-1] if points else None


def token_rates(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Output tokens per second of each worker between two polls. With one poll, the server's own mean is taken."""
    totals = {worker["name"]: worker["output_tokens"] for worker in before.get("workers", ())}
    seconds = now["time_s"] - before.get("time_s", now["time_s"])
    found = {}
    for worker in now["workers"]:
        name, total = worker["name"], worker["output_tokens"]
        measured = seconds > 0 and name in totals and total >= totals[name]
        found[name] = (total - totals[name]) / seconds if measured else worker["output_tokens_per_s"]
    return found


# --- the picture -----------------------------------------------------------------------------------------------------


def frame(watch: Watch, width: int, height: int | None) -> "RenderableType":
    """Everything that fits into so many lines; None: all of it."""
    from rich.console import Group

    status, wide = watch.status, width >= _WIDE
    parts: list[RenderableType] = [*_summary(watch, width)]
    left = (height or 10_000) - len(parts)
    workers = sorted(status["workers"], key=lambda worker: (worker["model"], worker["role"], worker["name"]))
    queue = status["queue"] or {"models": [], "dead": 0, "batches": []}
    n_batches = len(queue["batches"])
    # Requests get what the rest leaves, and at least four lines.
    room = max(3, left - 6 - (2 + n_batches if n_batches else 0)) if height else len(workers)
    parts += _section("WORKERS", len(workers), room, _workers(workers[:room], watch, wide))
    left -= 2 + min(room, len(workers))
    if n_batches or any(model["queued"] for model in queue["models"]):
        shown = queue["batches"][: max(1, left // 3 - 1)]
        parts += _section("BATCHES", n_batches, len(shown), _batches(shown, wide))
        left -= 2 + len(shown)
    requests = status["requests"][: max(1, left - 2)]
    total = sum(status["phases"].values())
    parts += _section("REQUESTS IN FLIGHT", total, len(requests), _requests(requests, wide))
    return Group(*parts)


def _summary(watch: Watch, width: int) -> list["Text"]:
    from rich.text import Text

    status = watch.status
    health = "serving" if status["ok"] else "not serving"
    head = Text(f"emberline {status['version']}", "bold")
    head.append(f"  {watch.address.url}  up {common.format_duration(status['uptime_s'])}  ", "dim")
    head.append(health, "green" if status["ok"] else "bold red")
    if problem := watch.problem or status["problem"]:
        head.append(f"  {printable(problem)}", "red")
    queue = status["queue"] or {"models": [], "dead": 0}
    phases, waiting = status["phases"], sum(status["waiting"].values())
    queued = sum(model["queued"] for model in queue["models"])
    load = Text(f"running {phases['prefill'] + phases['decode']:,} ({phases['prefill']:,} prefill)")
    load.append(f"  waiting {waiting:,}", "bold red" if waiting else "")
    load.append(f"  queued jobs {queued:,}")
    load.append(f"  dead letters {queue['dead']:,}", "bold red" if queue["dead"] else "")
    out = sum(watch.rates.values())
    step_s = status["step_s"]
    rates = Text(f"{out:,.0f} tokens/s out", "bold")
    if (prompt := watch.last("input_tokens")) is not None:
        rates.append(f"  {prompt / step_s:,.0f} in")
        rates.append(f"  {_percent(watch.last('cached_tokens'), prompt)} cached")
        rates.append(f"  {(watch.last('requests') or 0) / step_s:,.1f} requests/s")
    latency = Text("")
    for title, name in (("TTFT", "ttft"), ("ITL", "itl")):
        figures = [watch.last(f"{name}_{q}_ms") for q in ("p50", "p95", "p99")]
        latency.append(f"{title} p50/95/99 {'/'.join(map(_ms, figures))} ms  ")
    lines = [head, load, rates, latency]
    if width >= _WIDE and len(watch.series.get("time_s", ())) > 1:
        for title, name in (("tokens/s out, last hour", "output_tokens"), ("TTFT p95, last hour", "ttft_p95_ms")):
            chart = sparkline(watch.series[name], width - 28)
            lines.append(Text.assemble((f"{title:<26}", "dim"), (chart, "cyan")))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last values in so many columns, each the largest of its share; a gap where nothing was measured."""
    n = max(1, -(-len(values) // max(1, width)))
    shares = [[value for value in values[start : start + n] if value is not None] for start in range(0, len(values), n)]
    most = max((max(share) for share in shares if share), default=0)
    if not most:
        return ""
    return "".join(_BARS[int(max(share) / most * (len(_BARS) - 1))] if share else " " for share in shares)


def _section(title: str, total: int, shown: int, table: "Table") -> list["RenderableType"]:
    from rich.text import Text

    more = f" (the first {shown:,} of {total:,})" if shown < total else f" {total:,}"
    return [Text.assemble((title, "bold"), (more, "dim")), table] if total else [Text.assemble((title, "dim"), " –")]


def _table(*columns: str) -> "Table":
    """Columns; those that end in > are right-aligned."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.rstrip(">"), justify="right" if right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _workers(workers: Sequence[dict[str, Any]], watch: Watch, wide: bool) -> "Table":
    more = ("MODEL", "DEVICE", "MEMORY>", "POWER>", "PREFILL TOKENS>", "WAIT>") if wide else ()
    table = _table("NAME", "ROLE", "STATE", "RUN>", "WAITING>", "BUSY>", "KV>", "TOK/S>", "HIT>", *more)
    for worker in workers:
        state = worker["state"] if not worker["problem"] or not wide else f"{worker['state']}: {worker['problem']}"
        row: list[Text | str] = [
            _cell(worker["name"], 20 if not wide else 40),
            _cell(worker["role"]),
            _cell(state, 40, _STYLES.get(worker["state"], "yellow")),
            f"{worker['running']:,}",
            f"{worker['waiting'] + worker['held']:,}",
            _percent(worker["utilisation"], 1.0),
            "–" if worker["kv_used"] is None else f"{100 * worker['kv_used']:.0f} %",
            f"{watch.rates.get(worker['name'], 0):,.0f}",
            "–" if worker["hit_ratio"] is None else f"{100 * worker['hit_ratio']:.0f} %",
        ]
        if wide:
            row += [_cell(worker["model"], 48), _cell(worker["device"], 24)]
            memory, power_w = worker["memory_bytes"], worker["power_w"]
            row.append(common.format_size(worker["memory_used_bytes"]) if memory else "–")
            row.append("–" if power_w is None else f"{power_w:,.0f} W")
            row += [f"{worker['prefill_tokens']:,}", f"{worker['wait_s']:.1f} s"]
        table.add_row(*row)
    return table


def _batches(batches: Sequence[dict[str, Any]], wide: bool) -> "Table":
    table = _table("BATCH", "STATUS", "PROGRESS", "DONE>", "FAILED>", *(("MODEL", "ACCOUNT") if wide else ()))
    for batch in batches:
        total, done = batch["total"], batch["completed"] + batch["failed"]
        filled = round(16 * done / total) if total else 0
        row: list[Text | str] = [
            _cell(batch["id"], 24 if not wide else 48),
            _cell(batch["status"]),
            "█" * filled + "░" * (16 - filled),
            f"{done:,}/{total:,}",
            f"{batch['failed']:,}",
        ]
        table.add_row(*row, *((_cell(batch["model"], 48), _cell(batch["account"], 24)) if wide else ()))
    return table


def _requests(requests: Sequence[dict[str, Any]], wide: bool) -> "Table":
    more = ("WORKER", "MODEL", "ACCOUNT", "CLASS") if wide else ("WORKER",)
    table = _table("REQUEST", "PHASE", "AGE>", "IN>", "CACHED>", "OUT>", *more)
    for request in requests:
        worker = request["worker"]
        if request["prefill_worker"]:
            worker = f"{request['prefill_worker']} → {worker}"
        row: list[Text | str] = [
            _cell(request["id"], 18 if not wide else 44),
            _cell(request["phase"], style=_STYLES[request["phase"]]),
            common.format_duration(request["age_s"]),
            f"{request['input_tokens']:,}",
            f"{request['cached_tokens']:,}",
            f"{request['output_tokens']:,}",
            _cell(worker, 20 if not wide else 40),
        ]
        if wide:
            row += [_cell(request["model"], 40), _cell(request["account"], 20), _cell(request["priority"])]
        table.add_row(*row)
    return table


def _cell(text: str, most: int = 24, style: str = "") -> "Text":
    """Names come from clients and servers: no markup, no control characters."""
    from rich.text import Text

    text = " ".join(printable(text).split())
    if len(text) > most:  # the end of a name tells workers, and jobs of a batch, apart
        text = f"{text[: most // 3]}…{text[1 + most // 3 - most :]}"
    return Text(text, style)


def _percent(part: float | None, whole: float | None) -> str:
    return f"{100 * part / whole:.0f} %" if part is not None and whole else "–"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
