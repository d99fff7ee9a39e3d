"""`emberline cache`: the KV cache of a running server.

emberline cache stat
emberline cache purge --session fix-issue-42
emberline cache purge --account acme
emberline cache purge --everything
emberline cache export fix-issue-42 --output fix-issue-42.kv
emberline cache import fix-issue-42.kv
"""

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from emberline.cli import common
from emberline.cli import http_client as client
from emberline.config import Config
from emberline.protocol.errors import BadInput
from emberline.server.address import ServerAddress

_HEADINGS = ("WORKER", "TIER", "BLOCKS", "USED", "CAPACITY", "HITS", "READ", "WRITTEN", "RATE", "OLDEST", "STATE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    stat = actions.add_parser("stat", help="show the tiers of every engine worker", allow_abbrev=False)
    purge = actions.add_parser(
        "purge",
        help="forget cached KV in every tier of every worker, and what is remembered of its texts",
        allow_abbrev=False,
    )
    purge.add_argument("--session", metavar="ID", help="one session, by the id that its client sends")
    purge.add_argument("--everything", action="store_true", help="of all accounts")
    export = actions.add_parser("export", help="write a session's cached KV into a file", allow_abbrev=False)
    export.add_argument("session", metavar="SESSION", help="the id that its client sends")
    export.add_argument("--output", "-o", metavar="FILE", help="(default: SESSION.kv)")
    export.add_argument("--model", metavar="MODEL", help="needed if the session was used with several")
    load = actions.add_parser("import", help="read a session's cached KV from a file", allow_abbrev=False)
    load.add_argument("file", metavar="FILE")
    load.add_argument("--worker", metavar="NAME", help="that gets it, as `emberline ps` shows it (default: the first)")
    for action in (purge, export, load):
        action.add_argument("--account", metavar="NAME", help="whose KV (default: the caller's)")
    for action in (stat, purge, export, load):
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    address = ServerAddress.for_client(config)
    if (
        args.action == "purge"
        and args.everything
        and not common.names_server(args, config)
        and not client.is_running(address)
    ):
        return _purge_stored(args, config)
    if args.action == "stat":
        return _stat(args, client.get(address, "/api/cache"))
    if args.action == "purge":
        answer = client.post(address, "/api/cache/purge", _purge_body(args), timeout_s=None)
        text = (
            f"purged: {answer['blocks']} blocks, {answer['conversations']} prompts of conversations, "
            f"{answer['streams']} streams, {answer['replies']} cached replies"
        )
    elif args.action == "export":
        answer = _export(args, address)
        text = f"{answer['file']}: {common.format_size(answer['bytes'])}"
    else:
        query = _query(account=args.account, worker=args.worker)
        answer = client.send_file(address, f"/api/cache/import{query}", Path(args.file))
        text = f"{answer['blocks']} blocks imported into {answer['worker']}"
    common.print_json(answer) if args.json else print(text)
    return 0


def _purge_stored(args: argparse.Namespace, config: Config) -> int:
    """Without a server: purge the KV cache on this machine's disk, and the cached replies in the store."""
    from emberline.kv.tiers.disk.disk_folder import purge_unused

    folder = config.kv.disk_folder(config.home)
    answer = {
        "blocks": purge_unused(folder, None, None),
        "folder": str(folder),
        "replies": asyncio.run(_purge_replies(config)),
    }
    text = f"purged: {answer['blocks']} blocks in {folder}, {answer['replies']} cached replies"
    common.print_json(answer) if args.json else print(text)
    return 0


async def _purge_replies(config: Config) -> int:
    """Returns the number of cached replies that were in the store, which need not exist."""
    from emberline.gateway.response_cache import ResponseCache
    from emberline.service.service_factory import DATABASE
    from emberline.store import open_store

    if not config.store.url and not (config.home / DATABASE).exists():
        return 0
    store = await open_store(config.store.url or config.home / DATABASE)
    try:
        return await ResponseCache(store).purge(None)
    finally:
        await store.close()


def _purge_body(args: argparse.Namespace) -> dict[str, Any]:
    if not (args.session or args.account or args.everything):
        raise BadInput("say what to purge: --session ID, --account NAME or --everything")
    given = {"session": args.session, "account": args.account}
    return {name: value for name, value in given.items() if value} | ({"everything": True} if args.everything else {})


def _export(args: argparse.Namespace, address: ServerAddress) -> dict[str, Any]:
    """Written under another name first: a file that is there is complete."""
    target = Path(args.output or f"{args.session.replace('/', '_')}.kv")
    partial = target.with_name(f".{target.name}.part")
    query = _query(account=args.account, session=args.session, model=args.model)
    n_bytes = 0
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            for chunk in client.download(address, f"/api/cache/export{query}"):
                n_bytes += file.write(chunk)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return {"file": str(target), "bytes": n_bytes}


def _query(**given: str | None) -> str:
    found = {name: value for name, value in given.items() if value is not None}
    return f"?{urlencode(found)}" if found else ""


def _stat(args: argparse.Namespace, answer: dict[str, Any]) -> int:
    if args.json:
        common.print_json(answer)
        return 0
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for worker in answer["workers"]:
        device = worker["device"]
        rows.append((worker["name"], "device", f"{device['total_blocks']}", *["–"] * (len(_HEADINGS) - 4), "ok"))
        rows += [(worker["name"], *_tier(tier)) for tier in worker["tiers"]]
    common.print_table(rows)
    return 0


def _tier(tier: dict[str, Any]) -> tuple[str, ...]:
    asked = tier.get("hits", 0) + tier.get("misses", 0)
    size = common.format_size
    return (
        tier["name"],
        str(tier.get("blocks", 0)),
        size(tier.get("used_bytes", 0)),
        size(tier.get("capacity_bytes", 0)),
        f"{tier.get('hits', 0) / asked:.0%}" if asked else "–",
        size(tier.get("read_bytes", 0)),
        size(tier.get("written_bytes", 0)),
        f"{size(int(tier['read_rate']))}/s" if tier.get("read_rate") else "–",
        f"{tier['oldest_s']:.0f} s" if tier.get("oldest_s") else "–",
        tier.get("state", "ok"),
    )
