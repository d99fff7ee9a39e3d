import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from emberline.cli import top
from emberline.cli.main import main
from emberline.cli.top import Watch, frame, sparkline
from emberline.server.address import ServerAddress
from tests.cli.fake_server import FakeServer


def status(n_requests: int = 3, n_workers: int = 2, n_batches: int = 1, time_s: float = 1000.0) -> dict[str, Any]:
    worker = {
        "model": "@cf/x/model[bold]",
        "role": "decode",
        "state": "ready",
        "problem": "",
        "device": "cpu",
        "running": 3,
        "waiting": 1,
        "held": 1,
        "kv_used": 0.25,
        "utilisation": 0.75,
        "memory_used_bytes": 60 << 30,
        "memory_bytes": 80 << 30,
        "power_w": 410.0,
        "output_tokens": 500,
        "output_tokens_per_s": 12.0,
        "hit_ratio": 0.5,
        "prefill_tokens": 10,
        "wait_s": 0.1,
    }
    request = {
        "account": "evil\x1b[2J",
        "model": "m",
        "priority": "default",
        "phase": "decode",
        "age_s": 12.0,
        "input_tokens": 1000,
        "cached_tokens": 500,
        "output_tokens": 7,
        "worker": "worker-0",
        "prefill_worker": "",
    }
    batch = {"status": "in_progress", "total": 100, "completed": 48, "failed": 2, "model": "m", "account": "a"}
    return {
        "version": "1.0",
        "time_s": time_s,
        "uptime_s": 60,
        "ok": True,
        "problem": "",
        "workers": [{**worker, "name": f"worker-{n}"} for n in range(n_workers)],
        "models": [],
        "waiting": {"default": 2},
        "phases": {"waiting": 0, "prefill": 0, "decode": n_requests},
        "requests": [{**request, "id": f"req-{n:036}"} for n in range(n_requests)],
        "recent": [],
        "step_s": 10,
        "series": {
            "time_s": [990, 1000],
            "input_tokens": [0, 2000],
            "cached_tokens": [0, 500],
            "output_tokens": [10, 100],
            "requests": [0, 20],
            "ttft_p95_ms": [None, 20.0],
            "ttft_p50_ms": [None, 10.0],
            "ttft_p99_ms": [None, 30.0],
            "itl_p50_ms": [None, 1.0],
            "itl_p95_ms": [None, 2.0],
            "itl_p99_ms": [None, 3.0],
        },
        "queue": {
            "models": [{"model": "m", "queued": 50, "running": 1, "quarantined": 0, "age_s": 1.0}],
            "dead": 4,
            "batches": [{**batch, "id": f"batch_{n:032}"} for n in range(n_batches)],
        },
    }


def shown(found: dict[str, Any], width: int, height: int | None) -> list[str]:
    watch = Watch(ServerAddress("127.0.0.1", 1))
    watch.status, watch.series = found, found["series"]
    watch.rates = {worker["name"]: 6.0 for worker in found["workers"]}
    out = io.StringIO()
    Console(file=out, width=width, height=height, force_terminal=False).print(frame(watch, width, height))
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (60, 15)])
@pytest.mark.parametrize(("n_requests", "n_workers", "n_batches"), [(0, 0, 0), (3, 2, 1), (200, 40, 20)])
def test_it_fits(width: int, height: int, n_requests: int, n_workers: int, n_batches: int) -> None:
    lines = shown(status(n_requests, n_workers, n_batches), width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "\x1b[2J" not in "\n".join(lines)


def test_the_numbers() -> None:
    text = "\n".join(shown(status(), 200, 50))
    for expected in (
        "running 3 (0 prefill)",
        "waiting 2",
        "queued jobs 50",
        "dead letters 4",
        "12 tokens/s out",
        "200 in",
        "25 % cached",
        "2.0 requests/s",
        "TTFT p50/95/99 10/20/30 ms",
        "50/100",
        "@cf/x/model[bold]",
        "evil[2J",
        "25 %",
        "75 %",
        "410 W",
    ):
        assert expected in text, expected
    assert "more" not in text
    assert "(the first" in "\n".join(shown(status(n_requests=200), 80, 24))


def test_rates_between_polls() -> None:
    before, now = status(), status(time_s=1002.0)
    now["workers"][0]["output_tokens"] += 100
    now["workers"][1]["output_tokens"] = 3  # restarted
    assert top.token_rates(before, now) == {"worker-0": 50.0, "worker-1": 12.0}
    assert top.token_rates({}, now) == {"worker-0": 12.0, "worker-1": 12.0}


def test_sparklines() -> None:
    assert sparkline([0, 1, None, 7], 10) == "▁▂ █"
    assert sparkline([], 10) == sparkline([0, 0], 10) == ""
    assert len(sparkline(list(range(1, 361)), 50)) <= 50


def test_once_and_json(fake_server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_server.status = status()
    where = ["--port", fake_server.port, "--data-dir", str(tmp_path)]
    assert main(["top", "--once", *where]) == 0
    assert "WORKERS 2" in capsys.readouterr().out
    assert main(["top", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["phases"]["decode"] == 3
    assert main(["top", "--interval", "0", *where]) == 1
    assert "interval" in capsys.readouterr().err
    fake_server.shutdown()
    fake_server.server_close()
    assert main(["top", "--once", *where]) == 1
    assert "emberline serve" in capsys.readouterr().err
