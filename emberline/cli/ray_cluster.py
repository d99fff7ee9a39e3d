"""`emberline cluster up` and `down`: the Ray of this machine, which places and supervises workers.

emberline cluster up [--file cluster.yaml]
emberline cluster up --join HEAD --credential FILE
emberline cluster down
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emberline.cli import common
from emberline.config import Config
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.server.cluster_setup import CLUSTER_FILE, open_ray_launcher

if TYPE_CHECKING:
    from emberline.supervisor.cluster.cluster_file import ClusterFile
    from emberline.supervisor.cluster.launcher import ReplicaOrder
    from emberline.supervisor.cluster.ray_settings import NodeCredential, NodeSettings

LOG_NAME = "ray.log"


def add_arguments(actions: Any) -> None:
    up = actions.add_parser("up", help="start Ray here: the head, or a node that joins one", allow_abbrev=False)
    up.add_argument("--file", metavar="FILE", help=f"the cluster file (default {CLUSTER_FILE} in the data folder)")
    up.add_argument("--join", dest="join_head", metavar="HEAD", help="be a node of the head at HOST or HOST:PORT")
    up.add_argument("--address", metavar="HOST", help="at which the other machines reach this one")
    up.add_argument("--credential", metavar="FILE", help="of this node; not needed where the root secret is")
    up.add_argument("--foreground", action="store_true", help="stay, for a service manager, and log to stderr")
    common.add_data_dir(up)
    common.add_json(up)
    down = actions.add_parser("down", help="end what `emberline cluster up` has started here", allow_abbrev=False)
    common.add_data_dir(down)
    common.add_json(down)


def up(config: Config, args: argparse.Namespace) -> int:
    from emberline.supervisor.cluster import ray_cluster
    from emberline.supervisor.cluster.cluster_file import ClusterFile, read_cluster_file
    from emberline.supervisor.cluster.ray_settings import check_ray, make_private, write_credential

    check_ray()
    folder = config.home / ray_cluster.FOLDER
    ray_cluster.check_free(folder)
    own_file = config.home / CLUSTER_FILE
    path = Path(args.file) if args.file else own_file if own_file.exists() else None
    file = ClusterFile() if path is None else read_cluster_file(path)
    join = ray_cluster.split_address(args.join_head) if args.join_head else None
    address = ray_cluster.address_of_machine(file, join[0] if join else "", args.address or "")
    settings = ray_cluster.node_settings(file, folder, address, join)
    orders = _orders(config, file) if join is None else []
    make_private(folder)
    write_credential(_node_credential(config, args, address, is_head=join is None), folder)
    ray_cluster.check_head(settings[0])
    if args.foreground:
        return asyncio.run(_keep(config, file, settings, orders))
    return _start_in_background(args, folder, settings)


def _orders(config: Config, file: "ClusterFile") -> "list[ReplicaOrder]":
    """The file's replicas, of the models that this machine has. BadInput: one has no path, and is not here."""
    import msgspec

    from emberline.catalog.model_store import ModelStore

    store = ModelStore(config.home)
    ids, paths = {}, {}
    for model in file.models:
        try:
            found = store.resolve(model.name)
        except EmberlineError:
            if not model.path:
                raise BadInput(
                    f"model {model.name} has no path in the cluster file, and this machine does not have it: add one, "
                    f"or run `emberline pull {model.name}` on all machines"
                ) from None
            continue
        ids[model.name], paths[model.name] = found.card.id, found.path
    return [msgspec.structs.replace(order, model=ids.get(order.model, order.model)) for order in file.orders(paths)]


def _node_credential(config: Config, args: argparse.Namespace, address: str, *, is_head: bool) -> "NodeCredential":
    from emberline.accounts.secret import Secret
    from emberline.server.cluster_setup import ClusterKeys
    from emberline.supervisor.cluster.ray_settings import NodeCredential

    if args.credential:
        credential = NodeCredential.open(Path(args.credential))
        if credential.address != address:
            raise BadInput(
                f"{args.credential} is for {credential.address}, and this machine is {address}: give --address, or "
                f"make another one with `emberline cluster credential --node {address}`"
            )
        return credential
    secret = Secret.open(config.home) if is_head else Secret.existing(config.home)
    if secret is None:
        raise BadInput(
            f"this machine needs a credential: make one with `emberline cluster credential --node {address}` on the "
            "head's machine, and give it as --credential FILE"
        )
    return ClusterKeys(secret).node(address)


async def _keep(
    config: Config, file: "ClusterFile", settings: "list[NodeSettings]", orders: "list[ReplicaOrder]"
) -> int:
    """Keep the nodes and replicas running until SIGTERM or SIGINT."""
    from emberline import log
    from emberline.supervisor.cluster.ray_cluster import tend
    from emberline.supervisor.cluster.ray_node import RayNodes

    log.setup("ray", config.log.level, config.log.format)
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    launcher = open_ray_launcher(config, file, settings) if settings[0].is_head else None  # before anything is started
    nodes = RayNodes(settings, settings[0].folder)
    starting, ended = asyncio.create_task(nodes.start()), asyncio.create_task(stopping.wait())
    await asyncio.wait([starting, ended], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    await starting  # raises what it has raised
    print(json.dumps({"up": True, "pid": os.getpid()}), flush=True)
    tending = None if launcher is None else asyncio.create_task(tend(launcher, orders))
    try:
        await ended
    finally:
        if tending is not None and launcher is not None:
            tending.cancel()
            await asyncio.gather(tending, return_exceptions=True)
            await launcher.close()
        await nodes.stop()
    return 0


def _start_in_background(args: argparse.Namespace, folder: Path, settings: "list[NodeSettings]") -> int:
    words = ["cluster", "up", "--foreground"]
    for flag, value in (
        ("--file", args.file),
        ("--join", args.join_head),
        ("--address", args.address),
        ("--credential", args.credential),
        ("--data-dir", args.data_dir),
    ):
        if value:
            words += [flag, str(value)]
    log_path = folder / LOG_NAME
    with os.fdopen(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log_file:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "emberline.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log_file,
            start_new_session=True,
        )
    assert keeper.stdout is not None
    if not keeper.stdout.readline():
        keeper.wait()
        raise Unavailable(f"{_last_line(log_path)} (more in {log_path})")
    node = settings[0]
    if args.json:
        common.print_json({"pid": keeper.pid, "address": node.address, "head": node.head, "port": node.port})
        return 0
    print(f"The Ray {node.name} runs at {node.address}; its log is {log_path}")
    if node.is_head:
        print("Another machine joins with")
        print("  emberline cluster credential --node ADDRESS   (here; copy the file there)")
        print(f"  emberline cluster up --join {node.head}:{node.port} --credential FILE")
    return 0


def _last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("emberline: ") if lines else "Ray did not start"


def down(config: Config, args: argparse.Namespace) -> int:
    from emberline.supervisor.cluster.ray_cluster import FOLDER
    from emberline.supervisor.cluster.ray_node import end_all

    n_processes = end_all(config.home / FOLDER)
    if args.json:
        common.print_json({"ended": n_processes})
    elif n_processes:
        print(f"ended {n_processes} processes of Ray, and the workers that they had started")
    else:
        print("no Ray of this data folder runs here")
    return 0


def ray_status(config: Config) -> dict[str, Any] | None:
    """Nodes, and what is placed on them; None: no Ray runs here."""
    from emberline.supervisor.cluster.ray_cluster import FOLDER
    from emberline.supervisor.cluster.ray_launcher import RayLauncher
    from emberline.supervisor.cluster.ray_node import Record

    record = Record.read(config.home / FOLDER)
    if record is None or not record.processes():
        return None

    async def ask(node: "NodeSettings") -> dict[str, Any]:
        import msgspec

        launcher = RayLauncher(node, (), lambda name: "")
        try:
            nodes = await launcher.nodes()
            replicas = [msgspec.to_builtins(each) for each in await launcher.placed(let_run=False)]
            return {"head": node.head, "port": node.port, "nodes": nodes, "replicas": replicas}
        except EmberlineError as error:
            return {"head": node.head, "port": node.port, "problem": error.message, "nodes": [], "replicas": []}
        finally:
            await launcher.close()

    return asyncio.run(ask(record.nodes[-1]))


def print_status(status: dict[str, Any]) -> None:
    print(f"Ray, head {status['head']}:{status['port']}")
    if status.get("problem"):
        print(f"  {status['problem']}")
        return
    nodes = [
        (each["address"], each["kind"], f"{each['n_free']} of {each['n_total']}", each["region"] or "–")
        for each in status["nodes"]
    ]
    common.print_table([("NODE", "KIND", "FREE", "REGION"), *nodes])
    replicas = [
        (
            each["name"],
            each["model"] or "–",
            each["role"] or "–",
            ", ".join(each["addresses"]) or "–",
            each["state"],
            str(each["n_restarts"]),
            each["problem"],
        )
        for each in status["replicas"]
    ]
    if replicas:
        print()
        common.print_table([("REPLICA", "MODEL", "ROLE", "NODES", "STATE", "RESTARTS", ""), *replicas])
