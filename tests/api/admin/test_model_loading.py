from tests.api.fake_service import MODEL, FakeService, client_of


async def test_models_are_loaded_and_unloaded(service: FakeService) -> None:
    async with client_of(service) as client:
        loaded = await client.post("/api/models/load", json={"model": MODEL})
        unloaded = await client.post("/api/models/unload", json={"model": MODEL})
        unknown = await client.post("/api/models/load", json={"model": "nobody"})
        wrong = await client.post("/api/models/load", json={"name": MODEL})
    assert loaded.json() == {"model": MODEL, "state": "loaded"}
    assert unloaded.json() == {"model": MODEL, "state": "on_disk"}
    assert (unknown.status_code, wrong.status_code) == (404, 400)
    assert service.loads[:2] == [(MODEL, "load"), (MODEL, "unload")]


async def test_lists_show_the_state(service: FakeService) -> None:
    async with client_of(service) as client:
        openai = (await client.get("/v1/models")).json()["data"]
        workers_ai = (await client.get("/client/v4/accounts/a/ai/models/search")).json()["result"]
    assert {row["id"]: row.get("state") for row in openai}[MODEL] == "loaded"
    assert {row["name"]: row.get("state") for row in workers_ai}[MODEL] == "loaded"
