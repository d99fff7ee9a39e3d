"""Golden exchanges: requests to a running server, and everything that can be seen of them from outside."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.golden import files
from tests.golden.cases import all_cases
from tests.golden.exchange import Case, Client
from tests.golden.normal_form import Normaliser
from tests.golden.server import PATIENCE_S, Stage, running_stage

FOLDER = files.FOLDER / "exchanges"
CASES = all_cases()


@pytest.fixture(scope="module")
def stage(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_stage(smollm2, tmp_path_factory.mktemp("golden")) as stage:
        yield stage


@pytest.fixture(scope="module")
def ended() -> list[tuple[Client, Any]]:
    """The clients of the cases that have run, with the ledger that each of them left."""
    return []


async def run_case(stage: Stage, case: Case) -> tuple[Client, Any]:
    """Run a case; its client and its record."""
    golden = json.loads(files.read(FOLDER / f"{case.name}.json") or "{}")

    def is_over(record: Any) -> bool:
        """True if nothing more is awaited: all is as recorded, or a reply differs already."""
        now = Normaliser()(record)
        return now == golden or (not files.is_writing() and now["exchanges"] != golden.get("exchanges"))

    stage.reset()
    async with httpx.AsyncClient(base_url=stage.url, timeout=PATIENCE_S, verify=False) as http:
        client = Client(stage, http, case)
        await client.open()
        await case.run(client)
        return client, await client.settled(is_over)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_exchange_is_as_recorded(stage: Stage, ended: list[tuple[Client, Any]], case: Case) -> None:
    client, record = stage.background.run(run_case(stage, case))
    files.check(FOLDER / f"{case.name}.json", Normaliser()(record))
    ended.append((client, client.ledger()))


def test_no_request_ends_twice(ended: list[tuple[Client, Any]]) -> None:
    """No usage row and no log line has come after a case was over."""
    for client, ledger in ended:
        assert client.ledger() == ledger, client.account


def test_every_file_has_a_case() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    files.check_all_used(FOLDER, set(names))
