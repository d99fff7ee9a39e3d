"""Where a replica is placed, what becomes of its ranks' reports, and calls of the driver, without Ray."""

import io
import json
from typing import Any

import pytest

from emberline.protocol.errors import Conflict, Unavailable
from emberline.supervisor.cluster.ray_driver import NodeState, choose_group, rank_name, replica_name, serve, sum_up
from emberline.supervisor.cluster.ray_launcher import offers_of


def node(address: str, n_total: int, n_free: int, kind: str = "h200", region: str = "") -> NodeState:
    return NodeState(address=address, kind=kind, region=region, n_total=n_total, n_free=n_free)


def test_a_replica_is_divided_only_if_no_machine_is_large_enough() -> None:
    nodes = [node("a", 8, 8), node("b", 8, 2)]
    assert not choose_group(nodes, 8, True, "", "")
    assert choose_group(nodes, 10, True, "", "")
    with pytest.raises(Unavailable, match="16 GPUs are needed, and 10 are free"):
        choose_group(nodes, 16, True, "", "")
    with pytest.raises(Unavailable, match="4 GPUs on one machine are needed, and 5 are free on all"):
        choose_group([node("a", 8, 2), node("b", 8, 3)], 4, True, "", "")


def test_kind_and_region_count() -> None:
    nodes = [node("a", 8, 8, "h200", "eu"), node("b", 8, 8, "l40s", "us"), node("c", 2, 2, "cpu", "eu")]
    assert not choose_group(nodes, 8, True, "l40s", "us")
    with pytest.raises(Unavailable, match="1 l40ss are needed in region eu, and 0 are free"):
        choose_group(nodes, 1, True, "l40s", "eu")
    assert not choose_group(nodes, 2, False, "cpu", "")
    with pytest.raises(Unavailable, match="3 places on CPUs"):
        choose_group(nodes, 3, False, "cpu", "")


def test_offers_are_replicas_on_gpus_where_there_are_any() -> None:
    nodes = [node("a", 8, 8), node("b", 8, 3), node("c", 4, 4, "l40s"), node("d", 16, 16, "cpu")]

    def offered(n_ranks: int) -> list[tuple[str, int, float]]:
        return [(offer.gpu, offer.n_free, offer.cost) for offer in offers_of(nodes, n_ranks)]

    assert offered(1) == [("h200", 11, 1.0), ("l40s", 4, 1.0)]
    assert offered(2) == [("h200", 5, 2.0), ("l40s", 2, 2.0)]
    assert offered(10) == [("h200", 1, 10.0), ("l40s", 0, 10.0)], "larger than any machine"
    assert [(offer.gpu, offer.n_free) for offer in offers_of(nodes[3:], 2)] == [("cpu", 8)]
    assert offers_of([], 1) == ()


def test_names_of_ranks() -> None:
    assert [rank_name("big-0", rank) for rank in (0, 1)] == ["big-0", "big-0#1"]
    assert {replica_name(rank_name("big-0", rank)) for rank in range(4)} == {"big-0"}


def report(meeting: str, state: str = "running", address: str = "a") -> dict[str, Any]:
    about = {"address": address, "model": "m", "role": "both", "n_restarts": 0, "problem": "", "age_s": 1.0}
    return {"meeting": meeting, "state": state, **about}


def test_a_replica_waits_until_all_its_ranks_are_told_where_to_meet() -> None:
    assert sum_up("r", {"r": report("", "starting")})["waits"]
    assert not sum_up("r", {"r": report("1")})["waits"]
    assert sum_up("r", {"r": report("1"), "r#1": report("")})["waits"]  # rank 1 was lost
    assert sum_up("r", {"r": report(""), "r#1": report("1")})["waits"]  # rank 0 was lost
    assert sum_up("r", {"r": report("2"), "r#1": report("1")})["waits"]
    assert not sum_up("r", {"r": report("2"), "r#1": None})["waits"]  # Ray places rank 1 first
    summed = sum_up("r", {"r": report("2"), "r#1": report("2", address="b")})
    assert (summed["state"], summed["addresses"], summed["n_ranks"]) == ("running", ["a", "b"], 2)
    assert sum_up("r", {"r": None})["state"] == "starting"


class FakeDriver:
    def nodes(self) -> list[dict[str, Any]]:
        return [{"address": "a"}]

    def start(self, task: dict[str, Any]) -> None:
        raise Conflict(f"{task['name']} was started already")

    def replicas(self) -> list[dict[str, Any]]:
        raise RuntimeError("first line\nsecond line")

    def run(self, name: str, credential: str) -> None:
        return None

    def stop(self, name: str) -> None:
        return None


def test_each_call_has_one_answer() -> None:
    calls = [
        {"call": "nodes"},
        {"call": "start", "arguments": {"task": {"name": "x"}}},
        {"call": "replicas"},
        {"call": "run", "arguments": {"name": "x", "credential": "secret"}},
        {"call": "exit"},
    ]
    answers = io.StringIO()
    serve(FakeDriver(), io.StringIO("".join(json.dumps(call) + "\n" for call in calls)), answers)  # type: ignore[arg-type]
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"result": [{"address": "a"}]},
        {"error": {"kind": "conflict", "message": "x was started already"}},
        {"error": {"kind": "unavailable", "message": "Ray: first line"}},
        {"result": None},
        {"error": {"kind": "unavailable", "message": "Ray: 'exit'"}},
    ]
