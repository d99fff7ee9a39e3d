"""`emberline cluster plan` and `emberline cluster bounds`, from what a core answers."""

import json

import msgspec
import pytest

from emberline.cli.main import main
from emberline.config import ScalingConfig
from emberline.supervisor.cluster.planner import bounds_of, to_plain
from emberline.supervisor.cluster.replica_demand import NodeOffer, Replica, ReplicaCapacity
from emberline.supervisor.cluster.scaling_plan import ScalingObservation
from emberline.supervisor.cluster.scaling_policy import ScalingPolicy
from tests.cli.fake_server import FakeServer

NOW_S = 1_000_000.0


@pytest.fixture
def server(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A core with one model of which one replica is full and may not have another."""
    capacity = ReplicaCapacity(prefill_rate=1000.0, decode_rate=1000.0, kv_tokens=1000)
    replica = Replica(name="m-0", capacity=capacity, in_flight=3)
    seen = ScalingObservation(
        replicas=(replica,), offers=(NodeOffer(n_free=2),), kv_tokens=1000, start_s=10.0, last_request_s=NOW_S
    )
    bounds = ScalingConfig(max_replicas=1)
    plan = ScalingPolicy("m", bounds_of(bounds)).decide(seen, NOW_S)
    made = {"age_s": 65.0, "action": "start", "replica": "m-0", "role": "both", "outcome": "done", "took_s": 4.2}
    model = {
        "model": "m",
        "bounds": msgspec.to_builtins(bounds),
        "planner": {"core": "c0", "mode": "on"},
        "age_s": 1.5,
        "plan": msgspec.to_builtins(plan),
        "observation": to_plain(seen),
        "decisions": [{**made, "why": "there was none"}],
    }
    fake_server.answers["/api/cluster/plan"] = {"models": [model]}
    fake_server.answers["/api/cluster/bounds"] = {"bounds": msgspec.to_builtins(bounds)}
    monkeypatch.setenv("EMBERLINE_PORT", fake_server.port)
    return fake_server


@pytest.mark.usefixtures("server")
def test_the_plan_says_what_was_seen_done_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "m: 1 to 1 replicas",
        "by c0",
        "1 running",
        "load 1.25",
        "max_replicas is 1",
        "there was none",
        "4.2 s",
    ):
        assert part in shown


@pytest.mark.usefixtures("server")
def test_a_dry_run_decides_with_other_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "plan", "--dry-run", "--max", "3", "--json"]) == 0
    (model,) = json.loads(capsys.readouterr().out)["models"]
    assert [each["action"] for each in model["plan"]["decisions"]] == ["start"]
    assert main(["cluster", "plan", "--dry-run", "--max", "3"]) == 0
    assert "would start a replica (both)" in capsys.readouterr().out
    assert main(["cluster", "plan", "--max", "3"]) != 0
    assert main(["cluster", "plan", "--dry-run", "--max", "0"]) != 0


def test_bounds_are_set_shown_and_reset(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "bounds", "m"]) == 0
    assert "max_replicas" in capsys.readouterr().out
    assert server.posts == []
    assert main(["cluster", "bounds", "m", "--min", "0", "--idle-s", "60", "--disaggregated"]) == 0
    assert main(["cluster", "bounds", "m", "--reset"]) == 0
    assert [(path, json.loads(body)) for path, _, body in server.posts] == [
        ("/api/cluster/bounds", {"model": "m", "bounds": {"min_replicas": 0, "idle_s": 60.0, "disaggregated": True}}),
        ("/api/cluster/bounds", {"model": "m", "bounds": None}),
    ]
    assert main(["cluster", "bounds", "m", "--reset", "--max", "2"]) != 0


def test_nothing_is_scaled(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers["/api/cluster/plan"] = {"models": []}
    assert main(["cluster", "plan"]) == 0
    assert "No model is scaled" in capsys.readouterr().out
