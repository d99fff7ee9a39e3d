"""The KV cache on disk of a whole server: two accounts, two HTTP workers, and a worker that is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.console import emberline_process as emberline

ADMIN = "the-admin-key-of-this-server"
PROMPT = " ".join(f"{n} comes before {n + 1}." for n in range(60))
WAIT_S = 120.0


@pytest.fixture
def ready(smollm2: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / smollm2.parent.name).symlink_to(smollm2.parent)
    command = [sys.executable, "-m", "emberline.cli.main", "serve", "--port", "0", "--json", "--http-workers", "2"]
    flags = ["--kv-bytes", "64M", "--kv-disk-bytes", "100M", "--deterministic"]
    environment = {**os.environ, "EMBERLINE_HOME": str(tmp_path), "EMBERLINE_AUTH_KEY": ADMIN}
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the server did not start; its log is above"
    yield json.loads(line)
    process.terminate()
    assert process.wait(60) == 0


class Account:
    def __init__(self, url: str, name: str) -> None:
        admin = httpx.Client(base_url=url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=WAIT_S)
        key = admin.post("/api/keys", json={"account": name}).raise_for_status().json()["key"]
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=WAIT_S)

    def ask(self) -> tuple[str, dict[str, int], int]:
        """The reply, its cached tokens by tier, and all cached tokens."""
        body = {
            "model": "smollm2",
            "max_tokens": 8,
            "temperature": 0,
            "messages": [{"role": "user", "content": PROMPT}],
        }
        answer = self.client.post("/v1/chat/completions", json=body, headers={"x-session-affinity": "s"}).json()
        details = answer["usage"]["prompt_tokens_details"]
        by_tier = details.get("cached_tokens_by_tier", {})
        return answer["choices"][0]["message"]["content"], by_tier, details["cached_tokens"]


def wait_until(condition: Any) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def n_on_disk(url: str) -> int:
    answer = httpx.get(f"{url}/api/cache", headers={"authorization": f"Bearer {ADMIN}"}, timeout=WAIT_S).json()
    return sum(tier["blocks"] for worker in answer["workers"] for tier in worker["tiers"] if tier["name"] == "disk")


@pytest.mark.slow
def test_sessions_survive_a_killed_worker_and_accounts_their_neighbours(ready: dict[str, Any], tmp_path: Path) -> None:
    url = ready["url"]
    acme, rival = Account(url, "acme"), Account(url, "rival")
    text, _, _ = acme.ask()
    n_acme = n_blocks_of(url)
    assert rival.ask()[2] <= 16  # nothing of acme's: another salt
    wait_until(lambda: n_on_disk(url) >= 2 * n_acme)

    (worker,) = httpx.get(f"{url}/api/ps", headers={"authorization": f"Bearer {ADMIN}"}, timeout=60).json()["engines"]
    kill_worker(tmp_path)
    wait_until(lambda: (asked := try_ask(acme)) is not None and asked[:2] == (text, {"disk": asked[2]}))
    assert acme.ask()[2] > 200

    exported = acme.client.get("/api/cache/export", params={"session": "s"}).raise_for_status().content
    assert rival.client.post("/api/cache/import", content=exported).status_code == 403
    assert rival.client.post("/api/cache/purge", json={"account": "acme"}).status_code == 403
    assert rival.client.post("/api/cache/purge", json={"everything": True}).status_code == 403
    purged = acme.client.post("/api/cache/purge", json={"session": "s"}).raise_for_status().json()
    assert purged["workers"][worker["name"]]["disk"] >= n_acme
    assert acme.client.get("/api/cache/export", params={"session": "s"}).status_code == 404
    assert rival.ask()[2] > 200
    imported = acme.client.post("/api/cache/import", content=exported).raise_for_status().json()
    assert imported["blocks"] >= n_acme
    assert acme.ask()[:2] == (text, {"disk": 16 * imported["blocks"]})

    port = url.rpartition(":")[2]
    done = emberline("cache", "purge", "--everything", "--port", port, home=tmp_path, EMBERLINE_AUTH_KEY=ADMIN)
    assert done.stdout.startswith("purged: "), done.stderr
    assert not any(path.read_bytes().strip(b"\0") for path in (tmp_path / "kv").rglob("*.blocks"))


def n_blocks_of(url: str) -> int:
    """Blocks on disk once their number stays."""
    seen = [0]
    wait_until(lambda: seen.append(n_on_disk(url)) or (seen[-1] and seen[-1] == seen[-2]))
    return seen[-1]


def try_ask(account: Account) -> tuple[str, dict[str, int], int] | None:
    try:
        return account.ask()
    except (httpx.HTTPError, KeyError):  # the worker restarts
        return None


def kill_worker(home: Path) -> None:
    """The engine worker of the server with this data folder."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:  # another process has just ended
            continue
        if b"emberline.engine.worker" in words and str(home / "kv").encode() in words:
            os.kill(int(path.parent.name), signal.SIGKILL)
