"""Work for later: a file of requests, one line of OpenAI's batch format each.

emberline batch submit requests.jsonl --watch
emberline batch results batch_… > answers.jsonl
"""

import argparse
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.cli.http_client import Address
from emberline.protocol.errors import BadInput, Unavailable

WINDOW_S = 20.0  # the rate is that of the last while, so that a stall shows
_LEAST_BAR = 8


class Pace:
    """Lines that end a second."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, done: int, now_s: float | None = None) -> None:
        now_s = time.monotonic() if now_s is None else now_s
        self._seen.append((now_s, done))
        while now_s - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (start_s, before), (end_s, done) = self._seen[0], self._seen[-1]
        return max(0.0, (done - before) / max(end_s - start_s, 1e-9))


class Bar:
    """Where a person looks, the line is written over; elsewhere it is written when the figures have changed a lot."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._said_s = 0.0

    @property
    def width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns if self._live else 80
        except OSError:
            return 80

    def show(self, line: str) -> None:
        if self._live:
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)
        elif time.monotonic() - self._said_s > 10:
            self._said_s = time.monotonic()
            print(line, file=self._out, flush=True)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            print(file=self._out, flush=True)


def line_of(batch: dict[str, Any], pace: Pace, width: int) -> str:
    """A bar, what is done, what failed, how fast, and how long still; never wider than the terminal."""
    counts = batch["request_counts"]
    total, failed = int(counts["total"]), int(counts["failed"])
    done = int(counts["completed"]) + failed
    if not total or batch["status"] == "validating":
        return f"{batch['status']}: {total:,} lines read"[: width - 1]
    parts = [f"{done:,}/{total:,} done"]
    if failed:
        parts.append(f"{failed:,} failed")
    if batch["status"] not in ("in_progress", "finalizing"):
        parts.append(str(batch["status"]))
    elif pace.per_s:
        parts += [f"{pace.per_s:.1f}/s", f"{seconds((total - done) / pace.per_s)} left"]
    else:
        parts += _wait(batch.get("queue") or {})
    told = ", ".join(parts)
    room = width - len(told) - 10
    percent = f"{100 * done / total:3.0f} %"
    if room < _LEAST_BAR:
        return f"{percent} {told}"[: width - 1]
    room = min(room, 40)
    filled = room * done / total
    blocks = "█" * int(filled) + ("▌" if filled % 1 >= 0.5 else "")
    if (sys.stderr.encoding or "").lower().replace("-", "") != "utf8":
        blocks = "#" * int(filled)
    return f"{percent} [{blocks.ljust(room)}] {told}"


def _wait(place: dict[str, Any]) -> list[str]:
    """What the server says, as long as nothing has been seen to move."""
    parts = []
    if place.get("position"):
        parts.append(f"{place['position']:,} lines before it")
    if place.get("estimated_wait_s"):
        parts.append(f"{seconds(place['estimated_wait_s'])} left")
    return parts


def seconds(value: float) -> str:
    """A time as a person says it."""
    if value < 99.5:
        return f"{value:.0f} s"
    if value < 5940:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86_400:.0f} d"


ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
LOOK_S = 0.5
_PAGE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = actions.add_parser("submit", help="send a file of requests; prints the batch's id")
    submit.add_argument("file", type=Path, help="JSON lines: custom_id, method, url, body")
    submit.add_argument("--watch", action="store_true", help="stay and show how far it is")
    submit.add_argument("--window", default="24h", metavar="TIME", help="time to do it in, e.g. 24h (default)")
    for name, text in (
        ("status", "how far a batch is"),
        ("results", "its answers, as JSON lines"),
        ("cancel", "stop it"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("batch", help="the batch's id")
        if name == "status":
            action.add_argument("--watch", action="store_true", help="stay until it has ended")
        if name == "cancel":
            action.add_argument("--line", type=int, metavar="N", help="only this line, the first being 0")
        if name == "results":
            action.add_argument("--errors", action="store_true", help="the lines that failed instead")
            action.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to stdout")
    actions.add_parser("ls", help="batches, newest first").add_argument("-n", type=int, default=20, help="at most (20)")
    for action in actions.choices.values():
        common.add_address(action)
        common.add_data(action)
        common.add_json(action)


def run(args: argparse.Namespace) -> int:
    address = Address.of(common.config_of(args))
    return {"submit": _submit, "status": _status, "results": _results, "cancel": _cancel, "ls": _ls}[args.action](
        address, args
    )


def _submit(address: Address, args: argparse.Namespace) -> int:
    endpoint = _endpoint(args.file)
    file = client.upload(address, args.file, "batch")
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": args.window}
    batch = client.post(address, "/v1/batches", body)
    if not args.watch:
        if args.json:
            common.print_json(batch)
        else:
            print(batch["id"])
        return 0
    print(batch["id"], file=sys.stderr if args.json else sys.stdout, flush=True)
    return _watch(address, batch, args.json)


def _endpoint(path: Path) -> str:
    """What the file's first line is for: all of them must be for the same."""
    with path.open("rb") as file:
        first = file.readline(1 << 24)
    if not first.strip():
        raise BadInput(f"{path} is empty: it needs one JSON object a line")
    try:
        return str(json.loads(first).get("url") or ENDPOINT)
    except (ValueError, AttributeError):
        raise BadInput(
            f"{path}: line 1 is not a JSON object; each line needs custom_id, method, url and body"
        ) from None


def _watch(address: Address, batch: dict[str, Any], as_json: bool) -> int:
    """Show how far it is until it has ended. Ctrl-C leaves it running."""
    pace = Pace()
    try:
        with Bar(sys.stderr) as bar:
            while batch["status"] not in ENDED:
                pace.add(_done(batch))
                bar.show(line_of(batch, pace, bar.width))
                time.sleep(LOOK_S)
                batch = _look(address, batch)
            bar.show(line_of(batch, pace, bar.width))
    except KeyboardInterrupt:
        print(f"it goes on without us: emberline batch status --watch {batch['id']}", file=sys.stderr)
        return 130
    if as_json:
        common.print_json(batch)
    else:
        _print(batch)
    return 0 if batch["status"] == "completed" else 1


def _look(address: Address, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as it is now; a server that is being restarted is waited for: the batch will still be there."""
    try:
        found: dict[str, Any] = client.get(address, f"/v1/batches/{batch['id']}")
    except Unavailable:
        return batch
    return found


def _done(batch: dict[str, Any]) -> int:
    counts = batch["request_counts"]
    return int(counts["completed"]) + int(counts["failed"])


def _status(address: Address, args: argparse.Namespace) -> int:
    batch = client.get(address, f"/v1/batches/{args.batch}")
    if args.watch:
        return _watch(address, batch, args.json)
    if args.json:
        common.print_json(batch)
    else:
        _print(batch)
    return 0


def _print(batch: dict[str, Any]) -> None:
    counts = batch["request_counts"]
    rows = [
        ("batch", batch["id"]),
        ("status", batch["status"]),
        ("lines", f"{counts['completed']:,} of {counts['total']:,} done, {counts['failed']:,} failed"),
    ]
    if batch["status"] not in ENDED:
        place = batch.get("queue") or {}
        wait_s = place.get("estimated_wait_s")
        rows.append(("before it", f"{place.get('position') or 0:,} lines"))
        rows.append(("ready in", "nobody can tell yet" if wait_s is None else f"about {seconds(wait_s)}"))
    for error in (batch.get("errors") or {}).get("data", ())[:5]:
        where = f"line {error['line']}: " if error.get("line") else ""
        rows.append(("error", f"{where}{error['message']}"))
    if batch.get("output_file_id"):
        rows.append(("answers", f"emberline batch results {batch['id']}"))
    if batch.get("error_file_id"):
        rows.append(("failures", "the same with --errors"))
    common.print_table(rows)


def _results(address: Address, args: argparse.Namespace) -> int:
    batch = client.get(address, f"/v1/batches/{args.batch}")
    file_id = batch.get("error_file_id" if args.errors else "output_file_id")
    if not file_id:
        what = "failures" if args.errors else "answers"
        print(f"emberline: {args.batch} is {batch['status']} and has no {what} (yet)", file=sys.stderr)
        return 1
    out = args.output.open("wb") if args.output else sys.stdout.buffer
    try:
        for piece in client.download(address, f"/v1/files/{file_id}/content"):
            out.write(piece)
        out.flush()
    finally:
        if args.output:
            out.close()
    return 0


def _cancel(address: Address, args: argparse.Namespace) -> int:
    only = "" if args.line is None else f"?line={args.line}"
    batch = client.post(address, f"/v1/batches/{args.batch}/cancel{only}")
    if args.json:
        common.print_json(batch)
    else:
        _print(batch)
    return 0


def _ls(address: Address, args: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    after = ""
    while len(found) < args.n:
        page = client.get(address, f"/v1/batches?limit={min(_PAGE, args.n - len(found))}{after}")
        found += page["data"]
        if not page["has_more"] or not page["data"]:
            break
        after = f"&after={page['data'][-1]['id']}"
    if args.json:
        common.print_json(found)
        return 0
    rows = [(*_row(batch),) for batch in found]
    common.print_table([("BATCH", "STATUS", "DONE", "FAILED", "LINES", "AGE"), *rows])
    return 0


def _row(batch: dict[str, Any]) -> tuple[str, ...]:
    counts = batch["request_counts"]
    figures = (f"{counts[name]:,}" for name in ("completed", "failed", "total"))
    return batch["id"], batch["status"], *figures, seconds(max(0.0, time.time() - batch["created_at"]))
