from emberline.cluster.membership import WorkerChange
from emberline.config import EndpointConfig
from tests.api.fake_service import KEY, FakeService, client_of


async def test_changes_reach_the_service(service: FakeService) -> None:
    described = {"name": "gpu2", "url": "tcp://h:9", "kind": "emberline", "models": ["m"], "key": "t"}
    async with client_of(service) as client:
        for action, body in {
            "drain": {"name": "w"},
            "undrain": {"name": "w"},
            "restart": {"name": "w"},
            "role": {"name": "w", "role": "prefill", "wait_s": 3},
            "leave": {"name": "w", "stop": True},
            "join": described,
        }.items():
            answer = await client.post(f"/api/workers/{action}", json=body)
            assert answer.json() == {"workers": [{"name": "smollm2-0", "state": "ready", "in_flight": 1}]}
    config = EndpointConfig(name="gpu2", url="tcp://h:9", kind="emberline", models=("m",), key="t")
    assert service.changes == [
        WorkerChange(action="drain", name="w"),
        WorkerChange(action="undrain", name="w"),
        WorkerChange(action="restart", name="w"),
        WorkerChange(action="role", name="w", role="prefill", wait_s=3),
        WorkerChange(action="leave", name="w", stop=True),
        WorkerChange(action="join", name="gpu2", config=config),
    ]


async def test_a_worker_that_has_left_at_once_is_told() -> None:
    class Leaving(FakeService):
        async def change_workers(self, change: WorkerChange) -> list[str]:
            return ["gone-0"]

    async with client_of(Leaving()) as client:
        answer = await client.post("/api/workers/leave", json={"name": "gone-0"})
    assert answer.json() == {"workers": [{"name": "gone-0", "state": "left", "in_flight": 0}]}


async def test_bad_changes_are_refused(service: FakeService) -> None:
    async with client_of(service) as client:
        for action, body in (
            ("drain", {}),
            ("drain", {"name": "w", "force": True}),
            ("role", {"name": "w"}),
            ("role", {"name": "w", "role": "chef"}),
            ("role", {"name": "w", "role": "decode", "wait_s": 1e9}),
            ("join", {"name": "gpu2"}),
            ("join", {"name": "a b", "url": "http://h"}),
            ("join", {"name": "a", "url": "http://h", "kind": "abacus"}),
        ):
            assert (await client.post(f"/api/workers/{action}", json=body)).status_code == 400
    assert service.changes == []


async def test_changes_need_the_key(service: FakeService) -> None:
    async with client_of(service, key=KEY) as client:
        assert (await client.post("/api/workers/drain", json={"name": "w"})).status_code == 401
    assert service.changes == []
