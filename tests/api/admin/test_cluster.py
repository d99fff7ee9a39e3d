"""Endpoints of a cluster."""

import httpx

from emberline.api.admin.cluster import MAX_ANNOUNCEMENT_BYTES


async def test_an_announcement_which_anybody_may_send_is_small(client: httpx.AsyncClient) -> None:
    body = {"message": "x" * MAX_ANNOUNCEMENT_BYTES, "proof": ""}
    assert (await client.post("/api/cluster/announce", json=body)).status_code == 413
    assert (await client.post("/api/cluster/announce", json={"message": "{}", "proof": ""})).status_code == 400


async def test_the_plan_is_shown_and_bounds_are_set(client: httpx.AsyncClient) -> None:
    shown = await client.get("/api/cluster/plan", params={"model": "m", "limit": 5})
    assert shown.json() == {"models": [], "asked": ["m", 5]}
    assert (await client.get("/api/cluster/plan", params={"limit": -1})).status_code == 400
    bounds = {"model": "m", "bounds": {"max_replicas": 3}}
    assert (await client.post("/api/cluster/bounds", json=bounds)).json() == bounds
    for wrong in ({"model": "m"}, {"bounds": None}, {**bounds, "min": 1}):
        assert (await client.post("/api/cluster/bounds", json=wrong)).status_code == 400
