"""`emberline cluster upgrade`: workers are replaced one at a time, while the others serve.

Each drains, is asked to end so that whatever has started it starts it again, with the release that is installed there
by now, and is used again when it has joined. The first one that does not ends the upgrade, and the others stay as they
are.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from emberline.protocol.errors import Conflict, NotFound, Unavailable

POLL_S = 0.2

Member = dict[str, Any]


class ClusterApi(Protocol):
    """One core of the cluster."""

    def status(self) -> dict[str, Any]: ...

    def change(self, name: str, action: str) -> None: ...


class Upgrade:
    def __init__(
        self,
        api: ClusterApi,
        timeout_s: float,
        tell: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`timeout_s`: for a worker to come back. `tell` shows a line of progress."""
        self._api = api
        self._timeout_s = timeout_s
        self._tell = tell
        self._now_s = now_s
        self._sleep = sleep
        self._release = str(api.status()["release"])  # of the core, and so the one to have

    def run(self, names: Sequence[str] = (), every: bool = False) -> int:
        """Replace these, or those of another release than the core's, or every one. How many were. Unavailable,
        Conflict: one could not be, and what to do."""
        known = self._members()
        if unknown := [name for name in names if name not in known]:
            raise NotFound(f"no member of the cluster is called {unknown[0]}; `emberline cluster members` lists them")
        chosen = [
            name
            for name, member in known.items()
            if (name in names if names else every or member["release"] != self._release) and member["state"] != "lost"
        ]
        n_replaced = 0
        for number, name in enumerate(chosen):
            before = self._members()
            if name not in before or before[name]["state"] == "leaving":
                self._tell(f"{name} ({number + 1} of {len(chosen)}): leaves the cluster, and stays as it is")
                continue
            self._tell(f"{name} ({number + 1} of {len(chosen)}): drains")
            self._replace(name, before)
            n_replaced += 1
        return n_replaced

    def _replace(self, name: str, before: dict[str, Member]) -> None:
        old = before[name]
        self._check_others(old, before)
        was_draining = old["state"] == "draining"
        self._api.change(name, "drain")
        for members in self._polled(None):
            current = members.get(name)
            if current is None or not (current["in_flight"] or current["running"] or current["pushing"]):
                break
        self._tell(f"{name}: is asked to end")
        self._api.change(name, "restart")
        new = self._wait_for_next(old, set(before))
        if new["release"] != self._release:
            if not was_draining:
                self._api.change(new["name"], "undrain")
            raise Conflict(
                f"{new['name']} came back with release {new['release'] or 'older than 0.1.0'}, and not with "
                f"{self._release}: install that on its machine ({new['node']}), and run `emberline cluster upgrade` "
                "again. It serves as before; the others were not touched."
            )
        if new["state"] == "draining" and not was_draining:
            self._api.change(new["name"], "undrain")
        self._tell(f"{new['name']}: runs release {new['release']}")

    def _check_others(self, old: Member, members: dict[str, Member]) -> None:
        """Somebody must serve meanwhile."""
        others = [
            each
            for each in members.values()
            if each["name"] != old["name"]
            and (each["model"], each["account"]) == (old["model"], old["account"])
            and each["connected"]
            and each["state"] == "joined"
        ]
        if old["state"] != "draining" and not any(
            old["role"] == "prefill" or each["role"] != "prefill" for each in others
        ):
            raise Conflict(
                f"{old['name']} is the only worker of {old['model']} with its role: start another one first, or drain "
                f"it (`emberline cluster drain {old['name']}`) and run this again, and requests wait until it is back"
            )

    def _wait_for_next(self, old: Member, before: set[str]) -> Member:
        """The next run of the worker. If it has left the cluster: the first one in its place, which was not there
        before and has the same model, role, account and region. One that the planner, or somebody else, starts while
        the worker is still a member is not the one."""
        end_s = self._now_s() + self._timeout_s
        for members in self._polled(end_s):
            found = [each for each in members.values() if each["connected"] and _replaces(each, old, before)]
            if old["name"] in members:
                found = [each for each in found if each["name"] == old["name"]]
            if found:
                return min(found, key=lambda each: int(each["epoch"]))
        raise Unavailable(
            f"{old['name']} was asked to end, and did not come back within {self._timeout_s:.0f} s: start it on its "
            f"machine ({old['node']}) with release {self._release} (its log says why it does not), then "
            f"`emberline cluster undrain {old['name']}`, and run `emberline cluster upgrade` again. The others were "
            "not touched."
        )

    def _polled(self, end_s: float | None) -> Iterator[dict[str, Member]]:
        while end_s is None or self._now_s() < end_s:
            yield self._members()
            self._sleep(POLL_S)

    def _members(self) -> dict[str, Member]:
        return {member["name"]: member for member in self._api.status()["members"]}


def _replaces(new: Member, old: Member, before: set[str]) -> bool:
    if new["name"] == old["name"]:
        return bool(new["epoch"] > old["epoch"])
    kinds = ("model", "role", "account", "region")
    return new["name"] not in before and all(new[key] == old[key] for key in kinds)
