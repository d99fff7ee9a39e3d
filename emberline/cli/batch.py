"""`emberline batch`: a file of requests for later, one line of OpenAI's batch format each.

emberline batch submit requests.jsonl --watch
emberline batch results batch_… > answers.jsonl
"""

import argparse
import contextlib
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
from emberline.cli.common import format_duration
from emberline.cli.terminal import byte_progress, printable
from emberline.protocol.errors import BadInput, Unavailable
from emberline.server.address import ServerAddress

DEFAULT_ENDPOINT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
RATE_WINDOW_S = 20.0  # short enough that a stall shows
_PAGE_SIZE = 100
_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 8, 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    submit = actions.add_parser("submit", help="send a file of requests; prints the batch's id", allow_abbrev=False)
    submit.add_argument("file", type=Path, help="JSON lines: custom_id, method, url, body")
    submit.add_argument("--watch", action="store_true", help="show the progress until it has ended")
    submit.add_argument("--completion-window", default="24h", metavar="TIME", help="deadline, e.g. 24h (default)")
    for name, text in (
        ("status", "progress of a batch"),
        ("results", "its answers, as JSON lines"),
        ("cancel", "cancel it"),
    ):
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("batch", help="the batch's id")
        if name == "status":
            action.add_argument("--watch", action="store_true", help="show the progress until it has ended")
        if name == "cancel":
            action.add_argument("--line", type=int, metavar="N", help="only the job of this input line, from 0")
        if name == "results":
            action.add_argument("--errors", action="store_true", help="the failed requests instead")
            action.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there, not to stdout")
    listing = actions.add_parser("ls", help="batches, newest first", allow_abbrev=False)
    listing.add_argument("-n", type=int, default=20, help="at most (20)")
    for action in actions.choices.values():
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    address = ServerAddress.for_client(common.config_of(args))
    actions = {"submit": _submit, "status": _status, "results": _results, "cancel": _cancel, "ls": _list}
    return actions[args.action](address, args)


class Throughput:
    """Requests finished per second, over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()  # (time, requests finished in total)

    def add(self, n_finished: int, now_s: float | None = None) -> None:
        now_s = time.monotonic() if now_s is None else now_s
        self._samples.append((now_s, n_finished))
        while now_s - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def per_s(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (start_s, before), (end_s, after) = self._samples[0], self._samples[-1]
        return max(0.0, (after - before) / max(end_s - start_s, 1e-9))


class ProgressLine:
    """Rewritten in place on a terminal; elsewhere printed at most every ten seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._printed_s = 0.0

    @property
    def width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns if self._live else 80
        except OSError:
            return 80

    def show(self, line: str) -> None:
        if self._live:
            print(f"\r\x1b[K{line}", end="", file=self._out, flush=True)
        elif time.monotonic() - self._printed_s > 10:
            self._printed_s = time.monotonic()
            print(line, file=self._out, flush=True)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            print(file=self._out, flush=True)


def format_progress(batch: dict[str, Any], throughput: Throughput, width: int) -> str:
    """A bar, counts, throughput and remaining time in at most `width` columns."""
    total, failed, finished = int(batch["request_counts"]["total"]), _count(batch, "failed"), _finished(batch)
    if not total or batch["status"] == "validating":
        return f"{batch['status']}: {total:,} lines read"[: width - 1]
    parts = [f"{_count(batch, 'completed'):,}/{total:,} done"]
    if failed:
        parts.append(f"{failed:,} failed")
    if batch["status"] not in ("in_progress", "finalizing"):
        parts.append(str(batch["status"]))
    elif throughput.per_s:
        left_s = (total - finished) / throughput.per_s
        parts += [f"{throughput.per_s:.1f}/s", f"{format_duration(left_s)} left"]
    else:  # nothing has finished yet: the server's estimate
        queue = batch.get("queue") or {}
        if queue.get("position"):
            parts.append(f"{queue['position']:,} lines before it")
        if queue.get("estimated_wait_s"):
            parts.append(f"{format_duration(queue['estimated_wait_s'])} left")
    text = ", ".join(parts)
    percent = f"{100 * finished / total:3.0f} %"
    bar_width = min(width - len(text) - 10, _MAX_BAR_WIDTH)
    if bar_width < _MIN_BAR_WIDTH:
        return f"{percent} {text}"[: width - 1]
    filled = bar_width * finished / total
    blocks = "█" * int(filled) + ("▌" if filled % 1 >= 0.5 else "")
    if (sys.stderr.encoding or "").lower().replace("-", "") != "utf8":
        blocks = "#" * int(filled)
    return f"{percent} [{blocks.ljust(bar_width)}] {text}"


def _count(batch: dict[str, Any], name: str) -> int:
    return int(batch["request_counts"][name])


def _finished(batch: dict[str, Any]) -> int:
    return _count(batch, "completed") + _count(batch, "failed")


def _submit(address: ServerAddress, args: argparse.Namespace) -> int:
    endpoint = _endpoint(args.file)
    with byte_progress(f"uploading {printable(args.file.name)}", args.file.stat().st_size) as moved:
        file = client.upload(address, args.file, "batch", moved)
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": args.completion_window}
    batch = client.post(address, "/v1/batches", body)
    if args.watch:
        print(batch["id"], file=sys.stderr if args.json else sys.stdout, flush=True)
        return _watch(address, batch, args.json)
    if args.json:
        common.print_json(batch)
    else:
        print(batch["id"])
    return 0


def _endpoint(path: Path) -> str:
    """The endpoint of the file's first request; all requests of a file must be for the same one."""
    with path.open("rb") as file:
        first = file.readline(1 << 24)
    if not first.strip():
        raise BadInput(f"{path} is empty: it needs one JSON object per line")
    try:
        return str(json.loads(first).get("url") or DEFAULT_ENDPOINT)
    except (ValueError, AttributeError):
        raise BadInput(
            f"{path}: line 1 is not a JSON object; each line needs custom_id, method, url and body"
        ) from None


def _watch(address: ServerAddress, batch: dict[str, Any], as_json: bool) -> int:
    """Show the progress until the batch has ended. Ctrl-C leaves it running."""
    throughput = Throughput()
    try:
        with ProgressLine(sys.stderr) as progress:
            while batch["status"] not in ENDED:
                throughput.add(_finished(batch))
                progress.show(format_progress(batch, throughput, progress.width))
                time.sleep(POLL_S)
                try:
                    batch = client.get(address, f"/v1/batches/{batch['id']}")
                except Unavailable:  # the server may be restarting; the batch is durable
                    continue
            progress.show(format_progress(batch, throughput, progress.width))
    except KeyboardInterrupt:
        print(f"the batch continues: emberline batch status --watch {batch['id']}", file=sys.stderr)
        return 130
    _print_batch(batch, as_json)
    return 0 if batch["status"] == "completed" else 1


def _status(address: ServerAddress, args: argparse.Namespace) -> int:
    batch = client.get(address, f"/v1/batches/{args.batch}")
    if args.watch:
        return _watch(address, batch, args.json)
    _print_batch(batch, args.json)
    return 0


def _print_batch(batch: dict[str, Any], as_json: bool) -> None:
    if as_json:
        return common.print_json(batch)
    completed, failed, total = (f"{_count(batch, name):,}" for name in ("completed", "failed", "total"))
    rows = [
        ("batch", batch["id"]),
        ("status", batch["status"]),
        ("lines", f"{completed} of {total} done, {failed} failed"),
    ]
    if batch["status"] not in ENDED:
        queue = batch.get("queue") or {}
        wait_s = queue.get("estimated_wait_s")
        rows.append(("before it", f"{queue.get('position') or 0:,} lines"))
        rows.append(("ready in", "not known yet" if wait_s is None else f"about {format_duration(wait_s)}"))
    for error in (batch.get("errors") or {}).get("data", ())[:5]:
        where = f"line {error['line']}: " if error.get("line") else ""
        rows.append(("error", f"{where}{error['message']}"))
    if batch.get("output_file_id"):
        rows.append(("answers", f"emberline batch results {batch['id']}"))
    if batch.get("error_file_id"):
        rows.append(("failures", "the same with --errors"))
    common.print_table(rows)


def _results(address: ServerAddress, args: argparse.Namespace) -> int:
    batch = client.get(address, f"/v1/batches/{args.batch}")
    file_id = batch.get("error_file_id" if args.errors else "output_file_id")
    if not file_id:
        what = "failures" if args.errors else "answers"
        print(f"emberline: {args.batch} is {batch['status']} and has no {what} (yet)", file=sys.stderr)
        return 1
    out = args.output.open("wb") if args.output else sys.stdout.buffer
    try:
        shown = byte_progress(f"downloading {file_id}", None) if args.output else contextlib.nullcontext(None)
        with shown as moved:
            for chunk in client.download(address, f"/v1/files/{file_id}/content"):
                out.write(chunk)
                if moved is not None:
                    moved(len(chunk))
        out.flush()
    finally:
        if args.output:
            out.close()
    return 0


def _cancel(address: ServerAddress, args: argparse.Namespace) -> int:
    query = "" if args.line is None else f"?line={args.line}"
    _print_batch(client.post(address, f"/v1/batches/{args.batch}/cancel{query}"), args.json)
    return 0


def _list(address: ServerAddress, args: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    after = ""
    while len(found) < args.n:
        page = client.get(address, f"/v1/batches?limit={min(_PAGE_SIZE, args.n - len(found))}{after}")
        found += page["data"]
        if not page["has_more"] or not page["data"]:
            break
        after = f"&after={page['data'][-1]['id']}"
    if args.json:
        common.print_json(found)
        return 0
    common.print_table([("BATCH", "STATUS", "DONE", "FAILED", "LINES", "AGE"), *map(_row, found)])
    return 0


def _row(batch: dict[str, Any]) -> tuple[str, ...]:
    counts = (f"{_count(batch, name):,}" for name in ("completed", "failed", "total"))
    return batch["id"], batch["status"], *counts, format_duration(max(0.0, time.time() - batch["created_at"]))
