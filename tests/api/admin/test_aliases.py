from tests.api.fake_service import KEY, FakeService, client_of


async def test_changes_reach_the_service(service: FakeService) -> None:
    async with client_of(service) as client:
        assert (await client.get("/api/aliases")).json() == {"aliases": []}
        targets = {"smollm2": 90, "tiny": 10}
        assert (await client.post("/api/aliases", json={"name": "gpt-4o", "targets": targets})).status_code == 200
        assert (await client.delete("/api/aliases/@cf/moonshotai/kimi-k2.5")).status_code == 200
    assert service.alias_changes == [("gpt-4o", targets), ("@cf/moonshotai/kimi-k2.5", None)]


async def test_bad_aliases_are_refused(service: FakeService) -> None:
    async with client_of(service) as client:
        for body in (
            {},
            {"name": "a"},
            {"name": "a", "targets": {}},
            {"name": "a", "targets": {"b": 0}},
            {"name": "a", "targets": {"b": "1"}},
            {"name": "a" * 1_000_000, "targets": {"b": 1}},
            {"name": "a", "targets": {"b": 1}, "configured": True},
        ):
            assert (await client.post("/api/aliases", json=body)).status_code == 400
    assert service.alias_changes == []


async def test_changes_need_the_key(service: FakeService) -> None:
    async with client_of(service, key=KEY) as client:
        assert (await client.post("/api/aliases", json={"name": "a", "targets": {"b": 1}})).status_code == 401
    assert service.alias_changes == []
