"""The process that speaks with Ray for a launcher: `python -m emberline.supervisor.cluster.ray_driver HEAD:PORT`.

A process of its own, since Ray ends a driver whose head is gone for too long, waits without limit, and takes over
signals; a core must not depend on that. It reads one call per line on its standard input, and answers each with a line:
`{"call": "start", "arguments": {…}}`, `{"result": …}` or `{"error": {"kind": …, "message": …}}`. Calls are done one
after the other. It ends at the end of its input.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import msgspec

from emberline import log as logs
from emberline.protocol.errors import Conflict, EmberlineError, Unavailable
from emberline.supervisor.cluster.launcher import CPU
from emberline.supervisor.cluster.ray_replica import STOP_S, RankActor, RankTask
from emberline.supervisor.cluster.ray_settings import (
    ADDRESS_VARIABLE,
    CPU_RESOURCE,
    GPU_LABEL,
    REGION_LABEL,
)

NAMESPACE = "emberline"
ANSWER_S = 5.0  # for an actor to answer
PLACE_S = 10.0  # for Ray to place what there is room for
GONE_S = 30.0  # for the name of an ended actor to be free again
POLL_S = 0.1
_RANK = "#"  # between the name of a replica and the number of a rank; no member's name has it


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node that replicas can be placed on."""

    address: str
    kind: str  # of its GPUs; cpu: it has none
    region: str
    n_total: int  # GPUs, or ranks that it takes on its CPUs
    n_free: int


class Driver:
    def __init__(self, head: str) -> None:
        import ray

        self._ray = ray
        ray.init(
            address=head,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            _node_ip_address=os.environ[ADDRESS_VARIABLE],
        )

    # --- calls --------------------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        return [dict(msgspec.to_builtins(node)) for node in self._nodes()]

    def start(self, task: dict[str, Any]) -> None:
        """Conflict: there is one of this name. Unavailable: no room."""
        asked = msgspec.convert(task, RankTask, dec_hook=lambda kind, value: kind(value))
        order = asked.order
        found = self._actors()
        if order.name in found:
            if self._reports(found).get(order.name, {}).get("state") != "lost":
                raise Conflict(f"{order.name} was started already")
            self.stop(order.name)
        nodes = self._nodes()
        on_gpu = order.gpu != CPU and (bool(order.gpu) or any(node.kind != CPU for node in nodes))
        is_group = choose_group(nodes, order.layout.n_ranks, on_gpu, order.gpu, order.region)
        labels = {GPU_LABEL: order.gpu if on_gpu else "", REGION_LABEL: order.region}
        selector = {name: value for name, value in labels.items() if value}
        asked = msgspec.structs.replace(asked, on_gpu=on_gpu, is_group=is_group)
        resource = "GPU" if on_gpu else CPU_RESOURCE
        if not is_group:
            self._create(order.name, asked, {resource: order.layout.n_ranks}, label_selector=selector)
        else:
            self._create_ranks(asked, resource, selector)
        self._wait_placed(order.name)

    def replicas(self) -> list[dict[str, Any]]:
        """`waits`: it is placed, and some of its ranks have not been told to run."""
        actors = self._actors()
        reports = self._reports(actors)
        found = []
        for name in sorted({replica_name(each) for each in actors}):
            ranks = {each: reports.get(each) for each in actors if replica_name(each) == name}
            found.append({"name": name, **sum_up(name, ranks)})
        return found

    def run(self, name: str, credential: str) -> None:
        """Let all ranks of a replica run. Those that do already are left alone."""
        handles = {each: self._ray.get_actor(each) for each in self._actors() if replica_name(each) == name}
        if name not in handles:
            raise Unavailable(f"{name} is not placed")
        meeting = self._get(handles[name].meet.remote())
        for each, handle in handles.items():
            self._get(handle.run.remote(meeting, credential if each == name else ""), 2 * STOP_S)

    def stop(self, name: str) -> None:
        ranks = sorted(each for each in self._actors() if replica_name(each) == name)  # rank 0 first
        handles = [self._ray.get_actor(each) for each in ranks]
        stopping = [handle.stop.remote() for handle in handles]
        if stopping:
            self._ray.wait(stopping, num_returns=len(stopping), timeout=2 * STOP_S)
        for handle in handles:
            self._ray.kill(handle, no_restart=True)
        for group in self._ray.util.placement_group_table().values():
            if group["name"] == name and group["state"] != "REMOVED":
                self._ray.util.remove_placement_group(self._ray.util.get_placement_group(name))
        end_s = time.monotonic() + GONE_S
        while any(replica_name(each) == name for each in self._actors()):
            if time.monotonic() > end_s:
                raise Unavailable(f"Ray does not end {name}")
            time.sleep(POLL_S)

    # --- Ray ----------------------------------------------------------------------------------------------------------

    def _nodes(self) -> list[NodeState]:
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        found = []
        for node in self._ray.nodes():
            total, labels = node["Resources"], node["Labels"]
            resource = "GPU" if total.get("GPU") else CPU_RESOURCE
            if node["Alive"] and total.get(resource):
                state = NodeState(
                    address=node["NodeManagerAddress"],
                    kind=labels.get(GPU_LABEL, "cuda" if resource == "GPU" else CPU),
                    region=labels.get(REGION_LABEL, ""),
                    n_total=int(total[resource]),
                    n_free=int(free.get(node["NodeID"], {}).get(resource, 0)),
                )
                found.append(state)
        return sorted(found, key=lambda node: node.address)

    def _actors(self) -> dict[str, str]:
        """The state of each, as Ray has it, by name."""
        from ray._private.state import actors

        return {
            each["Name"]: each["State"]
            for each in actors().values()
            if each["State"] != "DEAD" and each["Name"] and each.get("RayNamespace", NAMESPACE) == NAMESPACE
        }

    def _reports(self, actors: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Collect the reports of the actors that answer."""
        asked = {}
        for name, state in actors.items():
            if state == "ALIVE":
                asked[self._ray.get_actor(name).report.remote()] = name
        if not asked:
            return {}
        ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        reports = {}
        for ref in ready:
            try:
                reports[asked[ref]] = self._ray.get(ref)
            except self._ray.exceptions.RayError:
                continue  # it has ended meanwhile, and is started anew
        return reports

    def _create_ranks(self, task: RankTask, resource: str, selector: dict[str, str]) -> None:
        order = task.order
        group = self._ray.util.placement_group(
            [{resource: 1}] * order.layout.n_ranks,
            strategy="PACK",  # few machines, not one
            name=order.name,
            lifetime="detached",
            bundle_label_selector=[selector] * order.layout.n_ranks,
        )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for rank in range(order.layout.n_ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
            ranked = msgspec.structs.replace(task, rank=rank)
            self._create(rank_name(order.name, rank), ranked, {resource: 1}, scheduling_strategy=place)

    def _wait_placed(self, name: str) -> None:
        """Wait until Ray has placed the replica's actors, so that the next order sees what is left. Ray goes on to
        place those that have found no room by then."""
        end_s = time.monotonic() + PLACE_S
        while any(state != "ALIVE" for each, state in self._actors().items() if replica_name(each) == name):
            if time.monotonic() > end_s:
                return
            time.sleep(POLL_S)

    def _create(self, name: str, task: RankTask, resources: dict[str, int], **options: Any) -> None:
        n_gpus = resources.pop("GPU", 0)
        remote = self._ray.remote(RankActor).options(
            name=name,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            num_gpus=n_gpus,
            resources=resources,
            **options,
        )
        remote.remote(task.encode())

    def _get(self, ref: Any, timeout_s: float = ANSWER_S) -> Any:
        try:
            return self._ray.get(ref, timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            raise Unavailable(f"a node does not answer: {type(error).__name__}") from None


def rank_name(replica: str, rank: int) -> str:
    return f"{replica}{_RANK}{rank}" if rank else replica


def replica_name(rank: str) -> str:
    return rank.partition(_RANK)[0]


def choose_group(nodes: Sequence[NodeState], n_ranks: int, on_gpu: bool, gpu: str, region: str) -> bool:
    """Return True if a replica's ranks are placed one by one, because the replica is larger than any machine. Raises
    Unavailable if there is no room."""
    fitting = [
        node
        for node in nodes
        if (node.kind != CPU) == on_gpu and gpu in ("", node.kind) and region in ("", node.region)
    ]
    n_free = sum(node.n_free for node in fitting)
    what = f"{gpu or 'GPU'}s" if on_gpu else "places on CPUs"
    where = f" in region {region}" if region else ""
    if any(node.n_total >= n_ranks for node in fitting):
        if not any(node.n_free >= n_ranks for node in fitting):
            raise Unavailable(f"{n_ranks} {what} on one machine are needed{where}, and {n_free} are free on all")
        return False
    if n_free < n_ranks:
        raise Unavailable(f"{n_ranks} {what} are needed{where}, and {n_free} are free")
    return True


def sum_up(name: str, ranks: dict[str, dict[str, Any] | None]) -> dict[str, Any]:
    """Merge the reports of a replica's ranks into the replica's. None stands for a rank that does not answer because
    Ray is placing it."""
    lead = ranks.get(name)
    known = [report for report in ranks.values() if report is not None]
    addresses = sorted({report["address"] for report in known})
    about = {"addresses": addresses, "n_ranks": len(ranks), "model": "", "role": ""}
    if lead is None:
        return {"state": "starting", "age_s": 0.0, "problem": "", "waits": False, "n_restarts": 0, **about}
    about |= {"model": lead["model"], "role": lead["role"]}
    waits = len(known) == len(ranks) and any(
        not each["meeting"] or each["meeting"] != lead["meeting"] for each in known
    )
    return {
        "state": lead["state"],
        "age_s": lead["age_s"],
        "problem": lead["problem"],
        "waits": waits,
        "n_restarts": lead["n_restarts"],
        **about,
    }


def serve(driver: Driver, calls: TextIO, answers: TextIO) -> None:
    methods: dict[str, Callable[..., Any]] = {
        method.__name__: method for method in (driver.nodes, driver.start, driver.replicas, driver.run, driver.stop)
    }
    for line in calls:
        asked = json.loads(line)
        try:
            answer = {"result": methods[asked["call"]](**asked.get("arguments", {}))}
        except EmberlineError as error:
            answer = {"error": {"kind": error.kind, "message": error.message}}
        except Exception as error:  # of Ray: its text may be long, and never has what was passed to an actor
            answer = {"error": {"kind": "unavailable", "message": f"Ray: {str(error).strip().splitlines()[0][:500]}"}}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints goes to stderr
    logs.setup("ray")
    driver = Driver(sys.argv[1])
    print(json.dumps({"result": "ready"}), file=answers, flush=True)
    serve(driver, sys.stdin, answers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
