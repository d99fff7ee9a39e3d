"""The worker process of a predictor: `python -m emberline.predictor.worker --manifest FILE --socket ADDRESS …`.

To a core it is like an engine worker: the same socket, frames, join token, load reports and signals. It keeps Cog's
server in a sandbox, and ends when that cannot go on, so that the supervisor starts another.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from emberline import log
from emberline.engine.addresses import listening
from emberline.engine.worker import process
from emberline.engine.worker.alive_file import open_alive_file
from emberline.engine.worker.announcer import open_joining
from emberline.engine.worker.socket_server import Server
from emberline.predictor.cog_server import CogServer
from emberline.predictor.prediction_loop import PredictionLoop
from emberline.protocol.errors import BadInput
from emberline.protocol.frames import predictor_info
from emberline.protocol.prediction import Manifest
from emberline.supervisor.engine_workers import PREDICTOR_SECRETS
from emberline.supervisor.sandbox.program import Sandbox
from emberline.supervisor.sandbox.protections import find_protections

_log = logging.getLogger(__name__)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises BadInput."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError) as error:
        why = error.strerror if isinstance(error, OSError) else error  # callers do not learn the path
        raise BadInput(f"the predictor's manifest cannot be read: {why}; push the model again") from None


def join_processors(processors: set[int]) -> None:
    """Bind this process to the predictor's processors: what it reads and checks, such as a log flood or a large
    output, then delays no other model either."""
    for thread in os.listdir("/proc/self/task") if processors else ():
        os.sched_setaffinity(int(thread), processors)


def main(argv: list[str] | None = None) -> int:
    """Serve until the worker is drained or its predictor crashes. Returns the exit status."""
    parser = process.arguments("emberline.predictor.worker", "Serve one predictor on one socket.")
    parser.add_argument("--manifest", type=Path, required=True, metavar="FILE")
    parser.add_argument("--bare", action="store_true", help="also where this machine cannot keep the predictor in")
    args = parser.parse_args(argv)
    log.setup("predictor")
    parent = process.Parent()
    process.end_on_signals()
    server: CogServer | None = None
    crashes: list[str] = []
    try:
        secrets: dict[str, str] = json.loads(os.environ.pop(PREDICTOR_SECRETS, "{}"))
        manifest = read_manifest(args.manifest)
        joining, alive_file = open_joining(args), open_alive_file(args.alive_file)
        token = process.join_token(args.socket) if joining is None else joining.token
        protections = find_protections()
        for missing in protections.missing:
            _log.warning("this machine lacks %s", missing)
        began_s = time.monotonic()
        granted = {name: value for name, value in secrets.items() if name in manifest.secrets}
        folder = args.manifest.parent
        server = CogServer(manifest, folder, Sandbox(protections, insists=args.bare), granted, folder / "logs" / "log")
        join_processors(server.processors)
        server.wait_ready()
        setup_s = time.monotonic() - began_s

        def on_crash(why: str) -> None:
            _log.error("%s; this worker ends", why)
            crashes.append(why)
            socket_server.drain(0.0)

        loop = PredictionLoop(manifest, server, on_crash)
        info = predictor_info(manifest.model, manifest.digest, manifest.slots)
        with listening(args.socket) as (listener, address):
            secure = None if joining is None else joining.secure(None)
            socket_server = Server(listener, loop, info, token, secure, alive_file)
            socket_server.watch(loop.wakeup, loop.clear_wakeup)
            facts = {"id": args.id, "address": address, "load_s": round(setup_s, 3), "bytes": server.memory_bytes}
            _log.info("serving %s version %d", manifest.model, manifest.version, extra=facts)
            announcer = None if joining is None else joining.announcer(info, address)
            status = process.serve(socket_server, parent, facts, announcer)
            if crashes:
                _log.error("%s", crashes[0])  # the last line is the supervisor's reason
            return 1 if crashes else status
    except Exception as error:
        if server is not None:
            server.log.add(str(error))
        return process.fail(error)
    finally:
        if server is not None:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
