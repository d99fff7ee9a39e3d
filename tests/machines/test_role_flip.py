"""The planner matches prefill and decode workers to the traffic: it changes roles, and requests go on."""

import pytest

from tests.cluster_processes import wait_until
from tests.machines.client_load import ClientLoad
from tests.machines.deployment import Deployment
from tests.machines.machines import Machine

RETUNED_S = 300.0  # within which the roles are to fit a change of the mix
# A prompt takes 0.25 s for each 256 tokens; four sequences get a token every 20 ms.
ENGINE = ("--token-budget", "256", "--max-running", "4", "--script", "say=count,chunk_ms=250,ttft_ms=20,itl_ms=20")
BOUNDS = {
    "disaggregated": True,
    "min_replicas": 3,
    "max_replicas": 3,
    "grow_after_s": 4.0,
    "settle_s": 5.0,
}
N_CLIENTS = 8


async def test_the_planner_changes_roles_as_the_mix_changes(
    cluster: Deployment, machines: dict[str, Machine], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"flip-a": "prefill", "flip-b": "decode", "flip-c": "decode"}
    for name, role in names.items():
        cluster.start_worker(name, machines["two" if name == "flip-a" else "three"], *ENGINE, "--role", role)
    cluster.wait_connected(*names)
    first, second = cluster.cores.values()
    epochs = {name: first.members()[name]["epoch"] for name in names}
    first.call("POST", "/api/cluster/bounds", {"model": cluster.model, "bounds": BOUNDS})

    def roles(role: str) -> list[str]:
        """The workers that have it, at both cores."""
        seen = [core.members() for core in (first, second)]
        return [name for name in names if all(members[name]["role"] == role for members in seen)]

    def decisions() -> list[dict[str, str]]:
        (plan,) = first.call("GET", "/api/cluster/plan?limit=50")["models"]
        return [each for each in plan["decisions"] if each["action"] == "flip"]

    load = ClientLoad(cluster, RETUNED_S)
    long_s = await load.run(
        N_CLIENTS, lambda: len(roles("prefill")) == 2, "no second prefill worker", n_words=1500, n_tokens=2
    )
    short_s = await load.run(
        N_CLIENTS, lambda: len(roles("decode")) == 2, "no second decode worker", n_words=10, n_tokens=200
    )
    with capsys.disabled():
        print(f"\nlong prompts: a worker was flipped to prefill after {long_s:.1f} s")
        print(f"long replies: a worker was flipped to decode after {short_s:.1f} s; {len(load.answers)} requests")
        print("\n".join(f"{each['role']}: {each['why']}" for each in decisions()))
    assert load.problems == []
    assert {each["role"] for each in decisions() if each["outcome"] == "done"} == {"prefill", "decode"}
    assert {name: second.members()[name]["epoch"] for name in names} == epochs, "none was started anew"
    first.call("POST", "/api/cluster/bounds", {"model": cluster.model, "bounds": None})
    wait_until(lambda: not first.call("GET", "/api/cluster/plan")["models"], "still scaled")
