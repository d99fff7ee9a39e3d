"""Starts the stand-in engine: where `EngineWorkers` would start the real one, or in a thread of the test process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberline.balancer.endpoint import Endpoint
from emberline.config import EngineConfig
from emberline.engine.addresses import listening
from emberline.engine.worker.socket_server import Server
from emberline.supervisor.engine_workers import MakeSpec, WorkerPlan
from emberline.supervisor.process import ProcessSpec
from standins import standin_engine


def standin_worker(*flags: str) -> MakeSpec:
    """A replacement for `engine_workers.worker_spec`; `flags` are the stand-in's own."""

    def make_spec(plan: WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        identity = ("--socket", str(socket), "--name", plan.model, "--role", plan.role, "--id", plan.name)
        return ProcessSpec(
            name=plan.name,
            module="standins.standin_engine",
            arguments=(*identity, *flags),
            env={"EMBERLINE_WORKER_TOKEN": token},
        )

    return make_spec


@contextmanager
def standin_thread(path: Path, *flags: object) -> Iterator[Endpoint]:
    """Run the stand-in in a thread, for a test to which the process does not matter: starting one takes half a second.

    `flags` are the stand-in's own.
    """
    args = standin_engine.parse_flags(["--socket", str(path), *map(str, flags)])
    loop, info = standin_engine.build(args, lambda request_id: server.disconnect(request_id))
    stopping, stop = socket.socketpair()
    with listening(args.socket) as (listener, address), stopping, stop:
        server = Server(listener, loop, info, "secret", accept_sender=loop.accept_sender)
        server.watch(stopping, lambda: stopping.recv(1) and server.drain(0.0))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield Endpoint(name="e0", address=address, token="secret")
        finally:
            stop.send(b"x")
            thread.join()
