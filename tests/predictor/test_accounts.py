"""Models that accounts push to a real server with their keys: pushed, run, listed, rolled back and removed."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from emberline.cli.main import main
from emberline.predictor.remote_push import pack
from emberline.predictor.versions import PredictorVersions
from emberline.supervisor.sandbox.protections import find_protections
from tests.predictor.conftest import write_project
from tests.predictor.test_serving import Serving, push, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here"),
]

ADMIN = "sk-emberline-the-operators-own-key"
SOURCE = """from cog import BaseRunner

class Runner(BaseRunner):
    def run(self, text: str = "") -> str:
        if text == "fail":
            raise ValueError("as I was told")
        return "{reply}" + text
"""
LISTS = (
    *("/v1/models", "/client/v4/accounts/me/ai/models/search", "/api/tags", "/api/ps", "/api/prices"),
    "/openapi.json",
)
RUN = "/client/v4/accounts/me/ai/run"


async def key_of(server: Serving, account: str) -> Mapping[str, str]:
    """Headers with a new key of a new account."""
    created = await server.root.post("/api/keys", json={"account": account})
    return {"authorization": f"Bearer {created.json()['key']}"}


async def test_models_of_accounts(
    versions: PredictorVersions, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(versions, tmp_path, "thing", "features")
    settings = {"auth.key": ADMIN, "predictors.remote_push": "accounts"}
    async with serving(versions, tmp_path, ["thing"], settings) as server:
        server.root.headers["authorization"] = f"Bearer {ADMIN}"
        alice, bob = [await key_of(server, name) for name in ("Alice", "bob")]

        async def ask(key: Mapping[str, str], path: str, **body: Any) -> httpx.Response:
            return await server.root.post(path, json=body, headers=key)

        async def push_as(key: Mapping[str, str], reply: str) -> httpx.Response:
            archive = pack(write_project(tmp_path / reply, SOURCE.replace("{reply}", reply)))
            return await server.root.post("/api/models/push?name=thing", content=archive, headers=key)

        async def listed(key: Mapping[str, str]) -> str:
            found = [await server.root.get(path, headers=key) for path in LISTS]
            assert all(each.is_success for each in found), found
            return "".join(each.text for each in found)

        async def command(*words: str) -> Any:
            """What `emberline` prints with alice's key."""
            key = alice["authorization"].removeprefix("Bearer ")
            options = ("--remote", "--json", "--url", str(server.root.base_url), "--api-key", key)
            capsys.readouterr()
            assert await asyncio.to_thread(main, [*words, *options]) == 0
            return json.loads(capsys.readouterr().out)

        for reply in ("first ", "second "):
            folder = write_project(tmp_path / reply, SOURCE.replace("{reply}", reply))
            assert (await command("push", str(folder), "--name", "thing"))["id"] == "@me/thing"
        assert [row["served"] for row in await command("model", "versions", "thing")] == [False, True]
        assert (await ask(alice, f"{RUN}/@me/thing", text="a")).json()["result"] == "second a"
        assert (await ask(bob, f"{RUN}/@me/thing", text="b")).json()["result"] == ["b"], "the operator's"
        hidden, missing = [await ask(bob, f"{RUN}/@accounts/{each}/thing", text="b") for each in ("a.lice", "nobody")]
        assert hidden.status_code == missing.status_code == 400
        told = [each.json()["errors"][0]["message"].partition(" (")[0] for each in (hidden, missing)]
        assert told[0].replace("a.lice", "nobody") == told[1]
        rolled = await ask(bob, "/api/models/rollback", model="@me/thing")
        assert rolled.status_code == 404, rolled.text
        assert (await push_as(bob, "bob's ")).is_success
        assert (await ask(bob, f"{RUN}/@me/thing", text="b")).json()["result"] == "bob's b"
        assert "a.lice" in await listed(alice)
        assert "a.lice" not in await listed(bob)
        assert [row["served"] for row in await command("model", "rollback", "@me/thing")] == [True, False]
        assert (await ask(alice, f"{RUN}/@me/thing", text="a")).json()["result"] == "first a"
        assert (await ask(bob, f"{RUN}/@me/thing", text="b")).json()["result"] == "bob's b"
        assert (await ask(alice, f"{RUN}/@me/thing", text="fail")).status_code == 500
        options = ("--remote", "--url", str(server.root.base_url), "--api-key", alice["authorization"][7:])
        assert await asyncio.to_thread(main, ["logs", "--model", "thing", *options]) == 0
        assert "as I was told" in capsys.readouterr().out
        queued = (await ask(alice, f"{RUN}/@me/thing?queueRequest=true", requests=[{"text": "q"}])).json()["result"]
        while "responses" not in (done := (await ask(alice, f"{RUN}/@me/thing", **queued)).json()["result"]):
            assert done["status"] in ("queued", "running")
        assert done["responses"][0]["result"] == "first q"
        usage = (await server.root.get("/api/usage", params={"by": "account,model"})).json()["data"]
        models = {(row["account"], row["model"]) for row in usage}
        assert {("Alice", "@accounts/a.lice/thing"), ("bob", "@accounts/bob/thing"), ("bob", "@me/thing")} == models
        assert await command("model", "rm", "@me/thing") == {"removed": ["@me/thing"]}
        assert (await ask(alice, f"{RUN}/@me/thing", text="a")).json()["result"] == ["a"], "the operator's again"
        assert (await ask(bob, f"{RUN}/@me/thing", text="b")).json()["result"] == "bob's b"
