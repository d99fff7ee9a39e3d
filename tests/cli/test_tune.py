"""`emberline tune` over a store with recorded usage and a server that tells what its workers have measured."""

import asyncio
import json
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest

from emberline.accounts.usage_row import UsageRow, insert_usage
from emberline.cli.main import main
from emberline.service.service_factory import DATABASE
from emberline.store import open_store
from tests.cli.fake_server import MODEL, FakeServer

NOW_US = 4_000_000_000_000_000  # far ahead: the same times in every run


def record(home: Path, n_sessions: int) -> None:
    """Agents' sessions of the last minutes, whose rows are in the store."""
    rng, now_us = Random(7), NOW_US
    rows = []
    for session in range(n_sessions):
        at_us, context = now_us - rng.randrange(30_000_000, 150_000_000), 0
        for turn in range(rng.randrange(1, 5)):
            n_prompt, n_output = context + rng.randrange(500, 4000), rng.randrange(20, 200)
            end_us = at_us + 300_000 + 40_000 * n_output
            fields: dict[str, Any] = {
                "id": f"r{n_sessions}-{session}-{turn}",
                "account": "acme",
                "model": MODEL,
                "model_version": "v",
                "status": "finished",
                "session": f"s{session}",
                "input_tokens": n_prompt,
                "cached_by_tier": {"device": context} if context else {},
                "output_tokens": n_output,
                "created_us": at_us,
                "first_token_us": at_us + 300_000,
                "finished_us": end_us,
            }
            rows.append(UsageRow(**fields))
            at_us, context = end_us + rng.randrange(1_000_000, 9_000_000), n_prompt + n_output

    async def write() -> None:
        store = await open_store(home / DATABASE)
        await store.transaction([insert_usage(row) for row in rows])
        await store.close()

    asyncio.run(write())


def workers(n_prefill: int, n_decode: int, step_cost: list[float] | None) -> dict[str, Any]:
    load = {"running": 0, "drafts": [["suffix", [100, 50], [5, 1]]], "step_cost": step_cost}
    engine = {
        "model": MODEL,
        "ok": True,
        "layout": "tp1",
        "device": "cuda:0",
        "context_len": 32_768,
        "kv_tokens": 120_000,
        "kv_token_bytes": 1024,
        "max_running": 64,
        "load": load,
    }
    roles = ["prefill"] * n_prefill + ["decode"] * n_decode
    return {"ok": True, "engines": [{**engine, "name": f"w{n}", "role": role} for n, role in enumerate(roles)]}


COST = [0.032, 1e-4, 3e-7, 1.6e-4, 9e-9, 5000, 0.03]


def command(server: FakeServer, home: Path, *more: str) -> list[str]:
    return ["tune", "--port", server.port, "--data-dir", str(home), "--itl", "0.06", *more]


def test_a_mistuned_server_gets_other_settings_and_the_file_before_is_kept(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, 40)
    fake_server.answers["/api/ps"] = workers(1, 2, COST)
    config = tmp_path / "emberline.toml"
    before = "[engine]\nprefill_workers = 1\ndecode_workers = 2\ntoken_budget = 256  # too small\n"
    config.write_text(before)
    assert main(command(fake_server, tmp_path, "--apply")) == 0
    said = capsys.readouterr().out
    assert "step times measured by its workers in 15,000 steps, ± 3%" in said
    assert "predicted gain" in said
    assert "-token_budget = 256  # too small" in said
    assert tomllib.loads(config.read_text())["engine"]["token_budget"] > 256
    (backup,) = tmp_path.glob("emberline.toml.before-*")
    assert backup.read_text() == before


def test_nothing_is_changed_unasked_or_without_a_clear_gain(
    fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, 24)
    fake_server.answers["/api/ps"] = workers(0, 1, COST)
    assert main(command(fake_server, tmp_path, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["worth_it"]
    assert said["now"]["setting"]["token_budget"] == 0
    assert said["step_cost"]["step_s"] == 0.032
    assert not (tmp_path / "emberline.toml").exists()


def test_what_is_missing_is_said(fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.answers["/api/ps"] = workers(0, 1, None)
    assert main(command(fake_server, tmp_path)) == 1
    assert "there is no store" in capsys.readouterr().err
    record(tmp_path, 2)
    assert main(command(fake_server, tmp_path)) == 1
    assert "too few to tune for" in capsys.readouterr().err
    record(tmp_path, 40)
    assert main(command(fake_server, tmp_path)) == 1
    assert "no worker has measured enough steps" in capsys.readouterr().err
    assert main(command(fake_server, tmp_path, "--model", "other")) == 1
    assert "no worker serves other" in capsys.readouterr().err
    url = f"http://127.0.0.1:{fake_server.port}"
    assert main(["tune", "--url", url, "--data-dir", str(tmp_path), "--model", "other"]) == 1
    assert "no worker serves other" in capsys.readouterr().err
