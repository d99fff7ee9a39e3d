"""Models that keys push over HTTP: who may, whose they are, and that they are in the audit log."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from emberline.accounts.account_service import AccountService, KeyGrant
from emberline.accounts.audit_log import Actor
from emberline.catalog.model_card import CogSource, pushed_id
from emberline.catalog.model_store import ModelStore
from emberline.catalog.offers import ModelMemory
from emberline.config import PredictorsConfig
from emberline.predictor.environments import Environment
from emberline.predictor.remote_push import RemotePushes, pack
from emberline.predictor.versions import PredictorVersions
from emberline.service.model_pulls import ModelPulls
from tests.api.fake_service import CARDS, KEY, FakeModels, FakeService, client_of
from tests.predictor.conftest import write_project

SOURCE = "class Runner:\n    def run(self, a: str) -> str:\n        return a\n"
LISTS = ("/v1/models", "/client/v4/accounts/me/ai/models/search", "/api/tags", "/openapi.json")


def build(root: Path, requirements: Sequence[str], python: str, on_line: Callable[[str], None]) -> Environment:
    """No environment: nothing is run."""
    return Environment("none", "/bin/sh", ())


async def keys_of(accounts: AccountService) -> dict[str, dict[str, str]]:
    """Headers with a key of each account, and with the operator's."""
    texts = {who: (await accounts.create_key(Actor("test"), who)).key.text for who in ("alice", "bob")}
    return {who: {"authorization": f"Bearer {text}"} for who, text in {**texts, "operator": KEY}.items()}


@pytest.mark.parametrize("setting", ["off", "admins", "accounts"])
async def test_keys_push_roll_back_and_remove_their_own_models(
    setting: Any, service: FakeService, accounts: AccountService, tmp_path: Path
) -> None:
    pushes = RemotePushes(tmp_path, PredictorsConfig(remote_push=setting), PredictorVersions(tmp_path, build))
    pulls = ModelPulls(ModelStore(tmp_path), lambda: ModelMemory(8 << 30, False), pushes)
    archive, keys = pack(write_project(tmp_path / "project", SOURCE)), await keys_of(accounts)
    may_push = {"off": (), "admins": ("operator",), "accounts": ("operator", "alice")}[setting]
    async with client_of(service, KEY, accounts=accounts, pulls=pulls) as client:

        async def ask(who: str, path: str, body: Any) -> httpx.Response:
            content = {"content": body} if isinstance(body, bytes) else {"json": body}
            return await client.post(f"/api/models/{path}", headers=keys[who], **content)

        for who in ("operator", "alice"):
            pushed = [await ask(who, "push?name=thing", archive) for _ in range(2)]
            assert [each.status_code for each in pushed] == [200 if who in may_push else 403] * 2, pushed[0].text
            rolled = await ask(who, "rollback", {"model": "@me/thing"})
            if who not in may_push:
                assert rolled.status_code == 403
                assert "remote_push" in rolled.json()["error"]["message"]
                continue
            assert [row["served"] for row in rolled.json()["data"]] == [True, False]
            log_paths = [f"/api/models/logs?model={each}" for each in ("thing&version=1", "@me/thing", "unknown")]
            account = "" if who == "operator" else who
            served = PredictorVersions(tmp_path).find(pushed_id(account, "thing"), 1)
            PredictorVersions(tmp_path).log_path(served).write_text(f"first\nof {who}\x07\nlast\n")
            for path in log_paths[:2]:
                found = await client.get(f"{path}&lines=2", headers=keys[who])
                assert found.json() == {"object": "list", "version": 1, "data": [f"of {who}\x07", "last"]}
            newer = await client.get("/api/models/logs?model=thing&version=2", headers=keys[who])
            assert newer.json() == {"object": "list", "version": 2, "data": []}
            for wrong in ("version=3", "lines=0", "lines=1001", "version=0"):
                refused = await client.get(f"/api/models/logs?model=thing&{wrong}", headers=keys[who])
                assert refused.status_code == (404 if wrong == "version=3" else 400), refused.text
            others = [await client.get(path, headers=keys["bob"]) for path in log_paths]
            assert [each.status_code for each in others] == [404 if setting == "accounts" else 403] * 3
            told = {each.json()["error"]["message"].replace("unknown", "thing") for each in others}
            assert len(told) == 1, "another account's model is as unknown as one that nobody pushed"
            for path, body in (("rollback", {"model": "thing"}), ("remove", {"model": "thing"})):
                other = await ask("bob", path, body)
                assert other.status_code == (404 if setting == "accounts" else 403), other.text
            found = await client.get("/api/models/versions?model=thing", headers=keys[who])
            assert [row["version"] for row in found.json()["data"]] == [1, 2]
            large = await ask(who, "push?name=large&cpus=9", archive)
            assert large.status_code == (200 if who == "operator" else 403), large.text
        if "alice" in may_push:
            assert (await ask("alice", "remove", {"model": "thing"})).json() == {"removed": "thing"}
            assert (await ask("alice", "rollback", {"model": "thing"})).status_code == 404
            acts = [(entry.act, entry.target, entry.details) for entry in await accounts.audit.entries(limit=1)]
            assert acts == [("POST /api/models/remove", "thing", '{"account":"alice"}')]
    left = {entry.card.id for entry in ModelStore(tmp_path).entries()}
    assert left == ({"@me/thing", "@me/large"} if may_push else set())


async def test_a_limited_key_manages_what_it_may_use(
    service: FakeService, accounts: AccountService, tmp_path: Path
) -> None:
    pushes = RemotePushes(tmp_path, PredictorsConfig(remote_push="accounts"), PredictorVersions(tmp_path, build))
    pulls = ModelPulls(ModelStore(tmp_path), lambda: ModelMemory(8 << 30, False), pushes)
    archive = pack(write_project(tmp_path / "project", SOURCE))
    async with client_of(service, KEY, accounts=accounts, pulls=pulls) as client:

        async def codes(name: str, **limits: Any) -> list[int]:
            key = (await accounts.create_key(Actor("test"), "alice", KeyGrant(**limits))).key.text
            client.headers["authorization"] = f"Bearer {key}"
            replies = [
                await client.post(f"/api/models/push?name={name}", content=archive),
                await client.get(f"/api/models/versions?model={name}"),
                await client.get(f"/api/models/logs?model={name}"),
                await client.post("/api/models/rollback", json={"model": name, "version": 1}),
                await client.post("/api/models/remove", json={"model": name}),
            ]
            return [reply.status_code for reply in replies]

        for limits in ({"models": ("@cf/*", "@me/other")}, {"apis": ("models", "run")}):
            assert await codes("thing", **limits) == [403] * 5, limits
        assert await codes("@ME/Thing", models=("@me/other*",)) == [403] * 5
        for allowed in ({"models": ("@me/thing",)}, {"models": ("@accounts/alice/*",)}, {"apis": ("push",)}):
            assert await codes("Thing", **allowed) == [200] * 5, allowed


async def test_models_of_an_account_are_listed_to_it_alone(service: FakeService, accounts: AccountService) -> None:
    source = CogSource(version=1, digest="", input={}, output={}, account="alice")
    own = msgspec.structs.replace(CARDS[0], id="@accounts/alice/thing", aliases=("@me/thing",), source=source)
    service.models = FakeModels([*CARDS, own])
    keys = await keys_of(accounts)
    async with client_of(service, KEY, accounts=accounts) as client:
        for who, sees in (("alice", True), ("operator", True), ("bob", False)):
            for path in LISTS:
                found = await client.get(path, headers=keys[who])
                assert CARDS[0].id in found.text
                assert ("/alice/thing" in found.text) is sees, (who, path)
