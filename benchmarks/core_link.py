"""CPU time of a call between an HTTP worker and the core, both ends together: `python -m benchmarks.core_link`.

Both ends are in this process, over a Unix socket pair, and the core answers at once: what is measured is encoding,
frames, decoding, the event loop and the socket. `request` is what one request costs: find, admit, the notice of the
first token, finalize.
"""

import argparse
import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import uvloop

from benchmarks.report import markdown
from emberline.accounts.usage_row import UsageRow
from emberline.net.rpc import Peer
from emberline.protocol.route_request import Route, RouteRequest
from emberline.service.core import Core, RequestEnd
from emberline.service.core_link import TO_CORE, TO_HTTP_WORKER, CoreServices, HttpWorkerServices

VERSION = "f" * 32
DIGESTS = [bytes(16)] * 6
REQUEST = RouteRequest(id="r" * 32, account="a", model="m", model_version=VERSION, input_tokens=512, created_us=1)
ROW = UsageRow(
    id=REQUEST.id,
    account="a",
    key_id="k",
    model="m",
    model_version=VERSION,
    priority="interactive",
    input_tokens=512,
    output_tokens=100,
    status="finished",
    created_us=1,
    finished_us=2,
)


class PromptCore:
    """Answers the calls of a request at once. Its other methods are not called."""

    async def find(self, account: str, model_version: str, digests: list[bytes]) -> None:
        return None

    async def admit(self, request: RouteRequest) -> Route:
        return Route(decode="e0")

    def first_token(self, request_id: str, cached_tokens: int) -> None:
        pass

    async def finalize(self, end: RequestEnd) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return None


async def _find(core: Core) -> None:
    await core.find("a", VERSION, DIGESTS)


async def _request(core: Core) -> None:
    await core.find("a", VERSION, DIGESTS)
    await core.admit(REQUEST)
    core.first_token(REQUEST.id, 5)
    await core.finalize(RequestEnd(ROW))


async def _measure(n_rounds: int, n_calls: int) -> dict[str, float]:
    """Median microseconds of CPU time per piece of work."""
    stub: Any = PromptCore()
    server = Peer("an HTTP worker", TO_CORE, CoreServices(*[stub] * len(CoreServices._fields)), TO_HTTP_WORKER)
    client = Peer("the core", TO_HTTP_WORKER, HttpWorkerServices(stub), TO_CORE)
    for peer, end in zip((server, client), socket.socketpair(), strict=True):
        await asyncio.get_running_loop().create_unix_connection(lambda peer=peer: peer, sock=end)  # type: ignore[misc]
    core = TO_CORE.remote(client.send, client.call).core
    works: dict[str, Callable[[Core], Awaitable[None]]] = {"find": _find, "request": _request}
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(n_rounds):
        for name, work in works.items():
            began_s = time.thread_time()
            for _ in range(n_calls):
                await work(core)
            found[name].append((time.thread_time() - began_s) / n_calls * 1e6)
    client.drop("the benchmark has ended")
    await asyncio.gather(client.closed, server.closed)
    return {name: median(values) for name, values in found.items()}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.core_link", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calls", type=int, default=1000, help="of each kind in a round")
    args = parser.parse_args(words)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(_measure(args.rounds, args.calls))
    print(markdown(["work", "µs"], [[name, f"{us:.1f}"] for name, us in found.items()]))


if __name__ == "__main__":
    main()
