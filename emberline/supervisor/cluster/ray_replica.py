"""A replica's process under Ray: the actor that starts it on the node where Ray has placed it, and restarts it there.

An actor is one rank of a replica, or a replica whose ranks are all on one machine, which rank 0 starts itself. Ray
keeps the actor's order and starts the actor anew elsewhere if its node is lost; the order holds no secret. What is
secret (the worker's credential, the token of a rank group) is handed to the actor by a call, so it is in no table or
file of Ray: only in the memory of this process and in the environment of the worker that it starts.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from emberline import log as logs
from emberline.engine.addresses import TOKEN_VARIABLE
from emberline.protocol.credential import VARIABLE as CREDENTIAL_VARIABLE
from emberline.supervisor.cluster.launcher import CPU, LEFT, LaunchState, ReplicaOrder
from emberline.supervisor.cluster.ray_settings import ADDRESS_VARIABLE, PORTS_VARIABLE, REGION_VARIABLE
from emberline.supervisor.engine_workers import JoinSettings, joining
from emberline.supervisor.process import ProcessFailed, ProcessSpec, SupervisedProcess

WORKER = "emberline.engine.worker"
TRIES = 3  # to start a process for the first time, where its port was taken or a rank was late
RETRY_S = 1.0
STOP_S = 10.0  # for a worker that was drained before


class RankTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of an actor: one rank, or all ranks that are on one machine. It contains no secrets."""

    order: ReplicaOrder
    rank: int = 0
    is_group: bool = False  # each rank has an actor of its own
    on_gpu: bool = False
    cores: tuple[str, ...]  # URLs to join at
    module: str = WORKER
    arguments: tuple[str, ...] = ()  # besides those that follow from the order

    def encode(self) -> bytes:
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def decode(cls, text: bytes) -> "RankTask":
        return msgspec.json.decode(text, type=cls, dec_hook=lambda kind, value: kind(value))


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Rendezvous of a replica's ranks during one run of rank 0's actor."""

    id: str
    rendezvous: str = ""  # tcp:HOST:PORT; empty: rank 0 starts the others
    token: str = ""

    def __repr__(self) -> str:
        return f"Meeting(id={self.id!r}, rendezvous={self.rendezvous!r}, token=…)"


class Node(msgspec.Struct, frozen=True):
    """The machine of this process, as the Ray node tells its actors."""

    address: str
    region: str
    first_port: int
    last_port: int

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> "Node":
        first, _, last = environ[PORTS_VARIABLE].partition("-")
        return cls(environ[ADDRESS_VARIABLE], environ.get(REGION_VARIABLE, ""), int(first), int(last))

    def free_port(self) -> int:
        """One that is free at this moment. OSError: none is."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        numbers = list(range(self.first_port, self.last_port + 1))
        start = secrets.randbelow(len(numbers))  # several replicas that start at once should not choose the same
        for port in numbers[start:] + numbers[:start]:
            with contextlib.suppress(OSError), socket.create_server((self.address, port), family=family):
                return port
        raise OSError(f"no port from {self.first_port} to {self.last_port} is free at {self.address}")

    def tcp(self, port: int) -> str:
        return f"tcp:[{self.address}]:{port}" if ":" in self.address else f"tcp:{self.address}:{port}"


def rank_spec(task: RankTask, node: Node, meeting: Meeting, credential: str, address: str) -> ProcessSpec:
    """The command line and environment of a rank that listens at `address`; see emberline/engine/worker/main.py."""
    order, layout = task.order, task.order.layout
    arguments = ["--name", order.model, "--socket", address, "--role", order.role]
    if task.module == WORKER:
        device = CPU if not task.on_gpu else "cuda:0" if task.is_group else "cuda"
        arguments += ["--model", str(order.path), "--device", device]
        for key in ("tp", "pp", "dcp"):
            if getattr(layout, key) > 1:
                arguments += [f"--{key}", str(getattr(layout, key))]
        arguments += ["--ep"] * layout.ep
    if task.is_group:
        arguments += ["--rank", str(task.rank), "--rendezvous", meeting.rendezvous]
    arguments += task.arguments
    env = {TOKEN_VARIABLE: meeting.token} if task.is_group else {}
    name = order.name if task.rank == 0 else f"{order.name}#{task.rank}"
    spec = ProcessSpec(name=name, module=task.module, arguments=tuple(arguments), env=env)
    if task.rank:
        return spec
    settings = JoinSettings(
        cores=task.cores,
        credential=credential,
        address=address,
        region=order.region or node.region,
        account=order.account,
    )
    joined = joining(spec, settings)
    return msgspec.structs.replace(joined, env={**env, CREDENTIAL_VARIABLE: credential})


class RankActor:
    """Ray actor that runs ranks. The launcher's driver calls its methods, which take and return plain data."""

    def __init__(self, task: bytes) -> None:
        logs.setup("replica")
        self._task = RankTask.decode(task)
        self._node = Node.of()
        self._meeting: Meeting | None = None
        self._own_meeting: Meeting | None = None
        self._process: SupervisedProcess | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._set("starting")

    async def report(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "problem": self.problem,
            "age_s": time.monotonic() - self._since_s,
            "meeting": "" if self._meeting is None else self._meeting.id,  # empty: it waits for `run`
            "pid": None if self._process is None else self._process.pid,
            "n_restarts": 0 if self._process is None else self._process.n_restarts,
            "address": self._node.address,
            "model": self._task.order.model,
            "role": self._task.order.role,
        }

    async def meet(self) -> dict[str, str]:
        """Return the rendezvous of the replica's ranks. Called on rank 0; the result stays the same as long as this
        actor lives."""
        if self._own_meeting is None:
            id_, rendezvous, token = secrets.token_hex(8), "", ""
            if self._task.is_group:
                rendezvous, token = self._node.tcp(self._node.free_port()), secrets.token_hex(32)
            self._own_meeting = Meeting(id=id_, rendezvous=rendezvous, token=token)
        return dict(msgspec.to_builtins(self._own_meeting))

    async def run(self, meeting: dict[str, str], credential: str) -> None:
        """Start the process, unless it was already for this meeting; one of an earlier meeting is ended first."""
        asked = msgspec.convert(meeting, Meeting)
        if self._meeting == asked:
            return
        self._meeting = asked
        await self._end()
        self._set("starting")
        keep = self._follow if self._task.rank else self._lead
        self._keeping = asyncio.create_task(keep(asked, credential))

    async def stop(self) -> None:
        await self._end()

    def _set(self, state: LaunchState, problem: str = "") -> None:
        self.state, self.problem, self._since_s = state, problem, time.monotonic()

    async def _end(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._process is not None:
            await self._process.stop(STOP_S)
            self._process = None

    async def _start(self, meeting: Meeting, credential: str) -> SupervisedProcess:
        address = self._node.tcp(self._node.free_port())
        self._process = SupervisedProcess(rank_spec(self._task, self._node, meeting, credential, address))
        await self._process.start()
        return self._process

    async def _lead(self, meeting: Meeting, credential: str) -> None:
        for n_tries in range(1, TRIES + 1):
            try:
                process = await self._start(meeting, credential)
                await process.wait_ready()
                break
            except (ProcessFailed, OSError) as error:
                may_pass = self._task.is_group or "in use" in str(error)
                if n_tries == TRIES or not may_pass:
                    return self._set("lost", str(error))
                await asyncio.sleep(RETRY_S)
        self._set("running")
        await process.wait_ended()
        self._set("lost", LEFT)

    async def _follow(self, meeting: Meeting, credential: str) -> None:
        """A rank ends with its group, and then waits for rank 0 to come back."""
        while True:
            try:
                process = await self._start(meeting, credential)
                self._set("running")
                await process.wait_ready()  # never: a follower says nothing, and this raises when it ends
            except (ProcessFailed, OSError) as error:
                self._set("starting", str(error))
            await asyncio.sleep(RETRY_S)
