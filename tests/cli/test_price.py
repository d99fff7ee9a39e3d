"""`emberline price` and `usage` on the store of this machine, as where no server runs."""

import asyncio
import json
import time
from pathlib import Path

import msgspec

from emberline.accounts.usage_ledger import UsageLedger
from emberline.store import open_store
from tests.accounts.test_usage_ledger import ROW

from .test_key import Run, emberline  # noqa: F401


def test_prices(emberline: Run) -> None:  # noqa: F811
    assert "No model has a price" in emberline("price", "ls")[1]
    words = ("--input", "0.60", "--cached-input", "0.10", "--output", "3.00", "--batch", "50", "--neuron", "0.000011")
    status, output, error = emberline("price", "set", "@cf/moonshotai/kimi-k2.5", *words)
    assert status == 0, error
    assert "0.60" in output
    (listed,) = json.loads(emberline("price", "ls", "--json")[1])["data"]
    assert listed["price"] == {
        "input": "0.60",
        "cached_input": "0.10",
        "output": "3.00",
        "neuron": "0.000011",
        "batch": 50,
    }
    assert listed["created_by"] == "operator"
    assert emberline("price", "rm", "@cf/moonshotai/kimi-k2.5")[0] == 0
    table = emberline("price", "history", "@cf/moonshotai/kimi-k2.5")[1]
    assert "no price" in table
    assert "batch 50%" in table
    assert emberline("price", "set", "@accounts/acme/m", "--input", "1")[0] == 0
    assert "none of its own" in emberline("price", "rm", "@accounts/acme/m")[1]
    assert emberline("price", "set", "@accounts/*", "--second", "0.5")[0] == 0
    _, own, default = emberline("price", "rm", "@accounts/acme/m")[1].splitlines()
    assert own.split()[0] == "@accounts/acme/m"
    assert default.split()[0] == "@accounts/*"
    assert "second 0.5" in default
    (_, last) = emberline("price", "rm", "@accounts/*")[1].splitlines()
    assert "no price" in last
    status, _, error = emberline("price", "set", "m", "--input", "cheap")
    assert (status, "`input`" in error) == (1, True)


def test_usage(emberline: Run, tmp_path: Path) -> None:  # noqa: F811
    async def record() -> None:
        store = await open_store(tmp_path / "emberline.db")
        now_us = time.time_ns() // 1000
        for n, cost_pico in enumerate((None, 1_234_567)):
            row = msgspec.structs.replace(ROW, id=str(n), created_us=now_us, cost_pico=cost_pico, session="s")
            await UsageLedger(store).record(row)
        await store.close()

    assert "Nothing was used" in emberline("usage")[1]
    asyncio.run(record())
    table = emberline("usage", "--account", "alice")[1]
    assert "0.000001234567 *" in table
    assert "1 requests have no cost" in table
    assert "12 of them" in table
    report = json.loads(emberline("usage", "--by", "day,model", "--json")[1])
    assert report["total"]["cost"] == "0.000001234567"
    heading, line = emberline("usage", "--csv", "--by", "account", "--since", "1d")[1].splitlines()
    assert heading.startswith("account,requests,")
    assert line.startswith("alice,2,")
