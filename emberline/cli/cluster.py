"""`emberline cluster`: many machines.

emberline cluster init
emberline cluster credential NAME
emberline cluster members
emberline cluster drain NAME [--wait]
emberline cluster role NAME prefill|decode|both [--wait]
emberline cluster leave NAME
emberline cluster plan [--model MODEL] [--dry-run]
emberline cluster bounds MODEL [--min N] [--max N]
emberline cluster up
emberline cluster down
emberline cluster upgrade
"""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, get_args

from emberline.cli import cluster_plan, common, ray_cluster
from emberline.cli import http_client as client
from emberline.cli.cluster_upgrade import Upgrade
from emberline.cli.terminal import transient_line
from emberline.config import Config
from emberline.protocol.errors import BadInput, EmberlineError, NotFound
from emberline.protocol.frames import WorkerRole
from emberline.server.address import ServerAddress

POLL_S = 0.2
ROLE_WAIT_S = 30.0  # of one request; it is repeated
_DONE = {"drain": "drains", "undrain": "gets requests again", "leave": "leaves, and ends when its requests have"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    init = actions.add_parser("init", help="make the cluster's secret and certificate authority", allow_abbrev=False)
    common.add_data_dir(init)
    common.add_json(init)
    made = actions.add_parser("credential", help="write the credential of a worker that is to join", allow_abbrev=False)
    made.add_argument("name", metavar="NAME", nargs="?", help="of the worker, unique in the cluster")
    made.add_argument("--node", metavar="ADDRESS", help="instead of a worker's: of a machine that is to be a Ray node")
    made.add_argument("--out", metavar="FILE", help="where to (default NAME.credential); -: print it")
    made.add_argument("--no-tls", action="store_true", help="without certificates: the network is private already")
    common.add_data_dir(made)
    ray_cluster.add_arguments(actions)
    cluster_plan.add_arguments(actions)
    for name, text in (
        ("members", "list the workers of the cluster"),
        ("status", "sum up the cluster and its members"),
    ):
        common.add_client_options(actions.add_parser(name, help=text, allow_abbrev=False))
    role = actions.add_parser("role", help="serve another stage, without a restart", allow_abbrev=False)
    role.add_argument("name", metavar="NAME", help="of a member, or of a worker of this server")
    role.add_argument("role", choices=get_args(WorkerRole), help="the stage that it serves from now on")
    role.add_argument("--wait", action="store_true", help="return when what it ran in its former role has ended")
    common.add_client_options(role)
    upgrade = actions.add_parser(
        "upgrade", help="replace workers of another release, one at a time", allow_abbrev=False
    )
    upgrade.add_argument("names", nargs="*", metavar="NAME", help="only these, whatever their release is")
    upgrade.add_argument("--all", action="store_true", help="every member, whatever its release is")
    upgrade.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="for a worker to come back (default 600)"
    )
    common.add_client_options(upgrade)
    for name, text in (
        ("drain", "send a member nothing new, from any core; it finishes what it has"),
        ("undrain", "use a drained member again"),
        ("leave", "drain a member, end it and forget it"),
    ):
        action = actions.add_parser(name, help=text, allow_abbrev=False)
        action.add_argument("name", metavar="NAME", help="as `emberline cluster members` shows it")
        if name != "undrain":
            action.add_argument("--wait", action="store_true", help="return when its last request has ended")
        common.add_client_options(action)


def run(args: argparse.Namespace) -> int:
    config = common.config_of(args)
    if args.action == "init":
        return _init(config, args)
    if args.action == "credential":
        return _credential(config, args)
    if args.action in ("up", "down"):
        return ray_cluster.up(config, args) if args.action == "up" else ray_cluster.down(config, args)
    address = ServerAddress.for_client(config)
    if args.action in ("plan", "bounds"):
        return cluster_plan.run(address, args)
    if args.action == "status":
        return _status(config, address, args)
    if args.action == "members":
        return _members(address, args)
    commands = {"role": _set_role, "upgrade": _upgrade}
    return commands.get(args.action, _change)(address, args)


def _init(config: Config, args: argparse.Namespace) -> int:
    """Nothing is made but the root secret, if there is none: the authority is derived from it."""
    from emberline.accounts.secret import FILE, Secret
    from emberline.server.cluster_setup import ClusterKeys

    answer = {
        "id": ClusterKeys(Secret.open(config.home)).id,
        "secret": str(config.home / FILE),
        "store": bool(config.store.url),
    }
    if args.json:
        common.print_json(answer)
        return 0
    print(f"cluster {answer['id']}")
    print(f"Every core needs the same root secret: copy {answer['secret']}, or its content in EMBERLINE_SECRET.")
    if not config.store.url:
        print("Several cores need one PostgreSQL database: set [store] url, or EMBERLINE_STORE_URL, on each.")
    print("Each worker needs a credential: emberline cluster credential NAME")
    return 0


def _credential(config: Config, args: argparse.Namespace) -> int:
    import msgspec

    from emberline.accounts.secret import Secret
    from emberline.cluster.cluster import cluster_id, join_key
    from emberline.protocol.credential import Credential
    from emberline.protocol.member import MemberName
    from emberline.server.cluster_setup import ClusterKeys

    if (args.name is None) == (args.node is None):
        raise BadInput("whose credential? Give the NAME of a worker, or --node ADDRESS")
    secret = Secret.open(config.home)
    if args.node is not None:
        if args.no_tls:
            raise BadInput("--no-tls is for workers: Ray nodes always use TLS")
        start = "emberline cluster up --join HEAD"
        return _write_secret(ClusterKeys(secret).node(args.node).encode(), args, args.node, start)
    try:
        name = msgspec.convert(args.name, MemberName)
    except msgspec.ValidationError:
        raise BadInput("the name of a worker has letters, digits, '_', '-' and single dots, at most 63") from None
    if args.no_tls:
        text = Credential(name=name, cluster=cluster_id(secret), key=join_key(secret, name)).encode()
    else:
        text = ClusterKeys(secret).worker_text(name)
    start = "emberline worker --model PATH --socket tcp:0.0.0.0:7070 --join URL"
    return _write_secret(text, args, name, start)


def _write_secret(text: str, args: argparse.Namespace, name: str, start: str) -> int:
    """`start`: the command that uses it, without the flag for the file."""
    if args.out == "-":
        sys.stdout.write(text)
        return 0
    path = Path(args.out or f"{name}.credential")
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput(f"{path} exists: remove it, or choose another with --out") from None
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}; choose another with --out") from None
    with os.fdopen(handle, "w") as file:
        file.write(text)
    common.print_note(f"{path} is secret: copy it to its machine, and start there")
    common.print_note(f"  {start} --credential {path.name}")
    return 0


def _status(config: Config, address: ServerAddress, args: argparse.Namespace) -> int:
    """Print the status of the core that is asked, and of this machine's Ray. Either may be missing."""
    ray = ray_cluster.ray_status(config)
    try:
        answer = client.get(address, "/api/cluster")
    except EmberlineError as error:
        if ray is None:
            raise
        answer, problem = None, error.message
    if args.json:
        common.print_json({**(answer or {"problem": problem}), "ray": ray})
        return 0
    if answer is None:
        common.print_note(problem)
    else:
        connected = sum(member["connected"] for member in answer["members"])
        region = f", region {answer['region']}" if answer["region"] else ""
        print(f"cluster {answer['id']}{region}: {len(answer['members'])} members, {connected} connected to this core")
        _print_members(answer["members"])
    if ray is not None:
        print()
        ray_cluster.print_status(ray)
    return 0


def _members(address: ServerAddress, args: argparse.Namespace) -> int:
    answer = client.get(address, "/api/cluster")
    if args.json:
        common.print_json(answer)
    else:
        _print_members(answer["members"])
    return 0


def _print_members(members: list[dict[str, Any]]) -> None:
    if not members:
        print("No worker has joined: `emberline cluster credential NAME` begins to add one.")
        return
    where = ("NAME", "MODEL", "ROLE", "ADDRESS", "TLS", "REGION", "ACCOUNT")
    headings = (*where, "EPOCH", "RELEASE", "STATE", "IN FLIGHT", "")
    common.print_table([headings, *(_row(member) for member in members)])


def _row(member: dict[str, Any]) -> tuple[str, ...]:
    problem = "" if member["connected"] else member["problem"]
    if member["state"] == "lost":
        problem = f"not seen for {common.format_duration(member['seen_s'])}"
    return (
        member["name"],
        member["model"],
        member["role"],
        member["address"].removeprefix("tcp:"),
        "yes" if member["is_tls"] else "no",
        member["region"] or "–",
        member["account"] or "–",
        str(member["epoch"]),
        member["release"] or "–",
        member["state"],
        str(member["in_flight"]),
        problem,
    )


def _change(address: ServerAddress, args: argparse.Namespace) -> int:
    if args.name not in {member["name"] for member in client.get(address, "/api/cluster")["members"]}:
        raise NotFound(f"no member of the cluster is called {args.name}; `emberline cluster members` lists them")
    answer = client.post(address, f"/api/workers/{args.action}", {"name": args.name})
    if getattr(args, "wait", False):
        with transient_line("waiting for its requests to end …"):
            while not _is_done(client.get(address, "/api/cluster")["members"], args):
                time.sleep(POLL_S)
    if args.json:
        common.print_json(answer)
    else:
        print(f"{args.name} {_DONE[args.action]}")
    return 0


def _set_role(address: ServerAddress, args: argparse.Namespace) -> int:
    body = {"name": args.name, "role": args.role, "wait_s": ROLE_WAIT_S if args.wait else 0.0}
    with transient_line("waiting for its requests to end …" if args.wait else ""):
        while True:
            began_s = time.monotonic()
            answer = client.post(address, "/api/workers/role", body)
            if not args.wait or time.monotonic() - began_s < ROLE_WAIT_S:
                break
    if args.json:
        common.print_json(answer)
    for worker in () if args.json else answer["workers"]:
        print(f"{worker['name']} has the role {args.role}")
    return 0


class _Core:
    """A `cluster_upgrade.ClusterApi`."""

    def __init__(self, address: ServerAddress) -> None:
        self._address = address

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = client.get(self._address, "/api/cluster")
        return answer

    def change(self, name: str, action: str) -> None:
        client.post(self._address, f"/api/workers/{action}", {"name": name})


def _upgrade(address: ServerAddress, args: argparse.Namespace) -> int:
    n = Upgrade(_Core(address), args.timeout, common.print_note).run(args.names, args.all)
    if args.json:
        common.print_json({"upgraded": n})
    else:
        print(f"{n} workers were replaced" if n else "all workers have this core's release")
    return 0


def _is_done(members: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """True if the member has no work left: this core knows its own requests, and the worker reports what it runs."""
    found = [member for member in members if member["name"] == args.name]
    if args.action == "leave":
        return not found
    return not any(member["in_flight"] or member["running"] or member["pushing"] for member in found)
