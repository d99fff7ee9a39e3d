"""A rolling upgrade against a cluster that is a dictionary."""

from typing import Any

import pytest

from emberline.cli.cluster_upgrade import Upgrade
from emberline.protocol.errors import Conflict, NotFound, Unavailable


def member(name: str, epoch: int, role: str, release: str = "1.0") -> dict[str, Any]:
    own = {"name": name, "epoch": epoch, "role": role, "release": release, "model": "m", "account": "", "node": "n1"}
    load = {"in_flight": 2, "running": 2, "pushing": False}
    return {**own, "region": "", "state": "joined", "connected": True, **load}


class FakeCluster:
    """Time passes in `sleep`. A worker that is asked to end is away for a while, then joins with `installed`."""

    def __init__(self, *names: str, role: str = "both") -> None:
        self.installed = "2.0"
        self.members = {name: member(name, epoch, role) for epoch, name in enumerate(names)}
        self.changes: list[tuple[str, str]] = []
        self.time_s = 0.0
        self.comes_back = True
        self.most_away = 0
        self._away: dict[str, float] = {}  # until when

    def status(self) -> dict[str, Any]:
        return {"release": "2.0", "members": [dict(each) for each in self.members.values()]}

    def change(self, name: str, action: str) -> None:
        self.changes.append((name, action))
        member = self.members[name]
        if action == "drain":
            member["state"] = "draining"
        elif action == "undrain":
            member["state"] = "joined"
        else:
            assert action == "restart"
            assert member["state"] == "draining"
            assert not member["in_flight"], "it is asked to end when nothing runs there"
            member["connected"] = False
            self._away[name] = self.time_s + 5
            self.most_away = max(self.most_away, sum(not each["connected"] for each in self.members.values()))

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds
        for member in self.members.values():
            if member["state"] == "draining":
                member["in_flight"] = member["running"] = 0
        for name, until_s in list(self._away.items()):
            if self.comes_back and self.time_s >= until_s:
                del self._away[name]
                self.come_back(name)

    def come_back(self, name: str) -> None:
        self.members[name] |= {"connected": True, "epoch": 100 + len(self.changes), "release": self.installed}

    def upgrade(self, *names: str, every: bool = False) -> int:
        lines: list[str] = []
        return Upgrade(self, 60, lines.append, lambda: self.time_s, self.sleep).run(names, every)


def test_workers_are_replaced_one_at_a_time() -> None:
    cluster = FakeCluster("a", "b", "c")
    assert cluster.upgrade() == 3
    assert cluster.most_away == 1
    assert cluster.changes == [(name, action) for name in "abc" for action in ("drain", "restart", "undrain")]
    assert {(each["release"], each["state"]) for each in cluster.members.values()} == {("2.0", "joined")}
    assert cluster.upgrade() == 0
    assert cluster.upgrade("b") == 1
    assert cluster.upgrade(every=True) == 3


def test_the_first_that_does_not_come_back_ends_it() -> None:
    cluster = FakeCluster("a", "b")
    cluster.comes_back = False
    with pytest.raises(Unavailable, match=r"a was asked to end.*n1.*release 2\.0.*undrain a"):
        cluster.upgrade()
    assert {name for name, _ in cluster.changes} == {"a"}


def test_one_that_comes_back_as_it_was_serves_on_and_ends_it() -> None:
    cluster = FakeCluster("a", "b")
    cluster.installed = "1.0"
    with pytest.raises(Conflict, match=r"a came back with release 1\.0, and not with 2\.0: install"):
        cluster.upgrade()
    assert {each["state"] for each in cluster.members.values()} == {"joined"}
    assert {name for name, _ in cluster.changes} == {"a"}


def test_another_worker_in_its_place_will_do() -> None:
    class Replacing(FakeCluster):
        def come_back(self, name: str) -> None:
            del self.members[name]
            self.members[f"{name}-next"] = member(f"{name}-next", 50, "both", "2.0")

    cluster = Replacing("a", "b")
    assert cluster.upgrade("a") == 1
    assert set(cluster.members) == {"a-next", "b"}


@pytest.mark.parametrize("difference", [{}, {"region": "eu"}, {"account": "acme"}, {"role": "decode"}])
def test_a_worker_that_joins_meanwhile_is_not_the_one_that_ended(difference: dict[str, str]) -> None:
    """The planner has started it, for instance, because one drains."""

    class Growing(FakeCluster):
        def change(self, name: str, action: str) -> None:
            super().change(name, action)
            if action == "restart":
                self.members["new"] = {**member("new", 50, "both", "2.0"), **difference}
                if difference:
                    del self.members["a"]  # it has left: one in its place would be like it
                    self.comes_back = False

    cluster = Growing("a", "b")
    if difference:
        with pytest.raises(Unavailable, match="a was asked to end"):
            cluster.upgrade("a")
    else:
        assert cluster.upgrade("a") == 1
        assert cluster.members["a"]["release"] == "2.0"
        assert cluster.changes[-1] == ("a", "undrain")


def test_the_last_one_with_its_role_is_not_ended_unless_it_drains_already() -> None:
    cluster = FakeCluster("a", "b", role="prefill")
    cluster.members["c"] = member("c", 3, "decode")
    with pytest.raises(Conflict, match="c is the only worker of m with its role"):
        cluster.upgrade("c")
    assert cluster.changes == []
    cluster.change("c", "drain")
    assert cluster.upgrade("c") == 1
    assert cluster.members["c"]["state"] == "draining", "an operator has drained it"
    assert cluster.upgrade("a") == 1


def test_workers_that_leave_meanwhile_are_left_alone() -> None:
    class Shrinking(FakeCluster):
        def come_back(self, name: str) -> None:
            super().come_back(name)
            self.members.pop("c", None)

    cluster = Shrinking("a", "b", "c", "d")
    cluster.members["a"]["state"] = "leaving"
    assert cluster.upgrade() == 2
    assert {name for name, _ in cluster.changes} == {"b", "d"}


def test_an_unknown_name() -> None:
    with pytest.raises(NotFound, match="no member of the cluster is called x"):
        FakeCluster("a").upgrade("x")
