"""A peer of the queue, run in an environment of its own: procrastinate on the PostgreSQL it is given.

`python procrastinate_worker.py URL fill N` or `… work CONCURRENCY`. Prints JSON. Imports nothing of Emberline's.
"""

import asyncio
import json
import sys
import time

from procrastinate import App, PsycopgConnector

BODY = "x" * 2000


def make_app(url: str) -> App:
    app = App(connector=PsycopgConnector(conninfo=url))

    @app.task(name="echo", queue="bench")
    async def echo(body: str) -> str:
        return body

    return app


async def fill(app: App, n: int) -> float:
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        began = time.perf_counter()
        for first in range(0, n, 500):
            await app.tasks["echo"].batch_defer_async(*({"body": BODY} for _ in range(min(500, n - first))))
        return time.perf_counter() - began


async def work(app: App, concurrency: int) -> float:
    async with app.open_async():
        began = time.perf_counter()
        await app.run_worker_async(queues=["bench"], concurrency=concurrency, wait=False, install_signal_handlers=False)
        return time.perf_counter() - began


def main() -> None:
    url, what, number = sys.argv[1:4]
    act = {"fill": fill, "work": work}[what]
    print(json.dumps({"seconds": asyncio.run(act(make_app(url), int(number)))}))


main()
