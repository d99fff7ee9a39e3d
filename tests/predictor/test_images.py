"""Images that `cog build` made: labels, what an engine is told, and a real container where an engine is here."""

import asyncio
import base64
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from emberline.catalog.model_store import ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.predictor.environments import COG, Environment
from emberline.predictor.image_labels import read_image, read_openapi
from emberline.predictor.versions import PredictorVersions, PushSettings
from emberline.protocol.errors import BadInput, EmberlineError, Unavailable
from emberline.supervisor.sandbox.containers import (
    Image,
    ImageConfig,
    find_engine,
    find_engines,
    find_image,
    is_granted,
    run_arguments,
)
from emberline.supervisor.sandbox.program import Program
from tests.predictor.cog_image import build_image, use_own_storage
from tests.predictor.conftest import ENVIRONMENTS, PROJECTS, copy_project
from tests.predictor.test_serving import RESOURCES, serving, until

CHOICES = {"title": "kind", "enum": ["a", "b"], "type": "string", "description": "An enumeration."}
INPUT = {
    "title": "Input",
    "type": "object",
    "required": ["image"],
    "properties": {
        "kind": {"x-order": 1, "allOf": [{"$ref": "#/components/schemas/kind"}], "default": "a"},
        "image": {"x-order": 0, "type": "string", "format": "uri", "title": "Image"},
    },
}


def document(given: Any = INPUT, **schemas: Any) -> dict[str, Any]:
    return {
        "paths": {"/predictions": {"post": {"x-cog-streaming": True}}},
        "components": {"schemas": {"Input": given, "Output": {"type": "string"}, "kind": CHOICES, **schemas}},
    }


def image(given: dict[str, Any] | None = None, **config: Any) -> Image:
    labels = {
        "run.cog.config": json.dumps({"build": {"gpu": True}, "concurrency": {"max": 4}}),
        "run.cog.openapi_schema": json.dumps(given or document()),
    }
    return Image("0a1b", ImageConfig(**{"Labels": labels, "Env": ["A=b"], "Cmd": None} | config))


def test_an_image_is_read_from_its_labels() -> None:
    found = read_image(image())
    assert (found.gpu, found.slots, found.signature.streams) == (True, 4, True)
    assert found.command == ("python", "-m", "cog.server.http")
    fields = found.signature.input["properties"]
    assert list(fields) == ["image", "kind"]
    assert (fields["kind"]["enum"], fields["kind"]["default"]) == (["a", "b"], "a")
    assert read_image(image(Env=["COG_MAX_CONCURRENCY=2"])).slots == 2
    for paths in ("x", {"/predictions": ["x"]}, {"/predictions": {"post": "x"}}):
        assert not read_openapi(document() | {"paths": paths}).streams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"components": {"schemas": {"TrainingInput": {}}}}, "trained only"),
        ({"components": []}, "no schema `Input`"),
        (document({"properties": {"a": {"$ref": "#/components/schemas/Input"}}}), "contain themselves"),
        (document({"properties": {"a": {"$ref": "#/components/schemas/none"}}}), "what is no schema"),
        (document({"properties": {"a": {"type": ["x"]}}}), "not known"),
        (document({"properties": {"a": {"type": "integer", "minimum": "9"}}}), "the bound minimum"),
        (document({"properties": ["a"]}), "without fields"),
        ({"components": {"schemas": 5}}, "no schema `Input`"),
        (document({"required": [["a"]]}), "names are no texts"),
        (document({"properties": {"a": {"items": ["a"]}}}), "`items` that are no schema"),
        (document({"anyOf": [{"$ref": "#/components/schemas/kind"}] * 3}, kind={"title": "x" * 500_000}), "too large"),
    ],
)
def test_labels_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EmberlineError, match=message):
        read_openapi(given)


def test_an_image_that_cog_did_not_build() -> None:
    for labels in (None, {"run.cog.config": "{"}, {"run.cog.config": "[]"}):
        with pytest.raises(BadInput, match=r"run\.cog\.config"):
            read_image(image(Labels=labels))


def test_an_image_that_is_not_bounded() -> None:
    with pytest.raises(BadInput, match=r"has volumes \(/data\), whose size cannot be bounded"):
        read_image(image(Volumes={"/data": {}}))
    with pytest.raises(BadInput, match="99999999999999999999 concurrent predictions; from 1 to 256"):
        read_image(image(Env=["COG_MAX_CONCURRENCY=" + "9" * 5000]))


def test_an_image_without_a_registry_is_pulled_from_docker_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    engine = tmp_path / "podman"
    engine.write_text(f'#!/bin/sh\n[ "$1" = version ] || echo "$@" >> {tmp_path}/asked\n[ "$1" = version ]\n')
    engine.chmod(0o755)
    with pytest.raises(Unavailable, match="me/model cannot be pulled"):
        find_image("me/model", ["docker.io/me"])
    assert "pull --quiet docker.io/me/model" in (tmp_path / "asked").read_text().splitlines()


def test_only_granted_registries_are_pulled_from() -> None:
    registries = ("ghcr.io/me", "docker.io/library", "localhost:5000")
    granted = "ghcr.io/me/model:1", "python", "python@sha256:00", "localhost:5000/x"
    others = "ghcr.io/me", "ghcr.io/mean/x", "ghcr.io/you/model", "someone/python", "evil.io/ghcr.io/me/model"
    assert [each for each in (*granted, *others) if is_granted(each, registries)] == list(granted)


def test_a_container_is_confined_and_its_secrets_are_no_arguments() -> None:
    program = Program(
        command=("python", "relay.py"),
        environment={"TOKEN": "tell-nobody", "HOME": "/tmp"},
        folder="/src",
        readable=(),
        memory_bytes=1 << 30,
        scratch_bytes=1 << 20,
        gpus=("0", "1"),
    )
    for kind in ("podman", "docker"):
        arguments, variables = run_arguments(kind, "name", "sha256:00", program, [("/a", "/b")])
        text = " ".join(arguments)
        for wanted in (
            *("--network none", "--read-only ", "--cap-drop ALL", "--security-opt no-new-privileges", "--pull never"),
            *("--user 65534:65534", f"--memory {(1 << 30) + (1 << 20)}", "--pids-limit 256", "--log-driver none"),
            *("--mount type=bind,source=/a,target=/b,readonly", "--env TOKEN", "--env HOME=/tmp", "size=1048576"),
        ):
            assert wanted in text, (kind, wanted)
        assert text.endswith("sha256:00 python relay.py")
        assert "tell-nobody" not in text
        assert variables["TOKEN"] == "tell-nobody"
        assert variables["HOME"] == os.environ["HOME"]
        steering = msgspec.structs.replace(program, environment={"DOCKER_HOST": "tcp://elsewhere"})
        with pytest.raises(BadInput, match="DOCKER_HOST is a variable of the container engine"):
            run_arguments(kind, "name", "sha256:00", steering, [])


def test_a_machine_without_an_engine_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"podman is not installed; docker is not installed.*Docker or Podman"):
        find_engine()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(Unavailable, match="push the project's folder instead"):
        find_engine()
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n[ $1 = context ] && echo tcp://10.0.0.1:2375\n")
    docker.chmod(0o755)
    engines, problem = find_engines()
    assert not engines
    assert "docker's context is tcp://10.0.0.1:2375, another machine" in problem
    for wrong in ("", "--privileged", "a b"):
        with pytest.raises(BadInput, match="is not the name of an image"):
            find_image(wrong)


@pytest.fixture
def features(cog_environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an image with the tests' predictor. It is built once per machine."""
    for name, value in use_own_storage(ENVIRONMENTS / "containers").items():
        monkeypatch.setenv(name, value)
    engines, problem = find_engines()
    podman = next((each for each in engines if each.kind == "podman"), None)
    if podman is None:
        pytest.skip(f"needs a container engine: {problem}")
    source = (PROJECTS / "features.py").read_bytes() + Path(__file__).with_name("cog_image.py").read_bytes()
    name = f"emberline-features:{hashlib.sha256(source + COG.encode()).hexdigest()[:16]}"
    if podman.ask("image", "exists", name).returncode:
        build_image(podman, name, copy_project(tmp_path / "project", "features"), cog_environment)
    yield name
    left = podman.ask("ps", "--all", "--quiet").stdout
    assert not left, "a container is left"


@pytest.mark.slow
async def test_an_image_is_served_like_a_folder(features: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBERLINE_GRANT_TOKEN", "tell-nobody-123")
    versions = PredictorVersions(tmp_path / "home")
    settings = PushSettings(name="boxed", resources=RESOURCES, secrets=("TOKEN",))
    manifest = versions.push_image(features, settings, lambda line: None)
    publish(ModelStore(tmp_path / "home"), manifest, versions.path(manifest))
    async with serving(versions, tmp_path, ["boxed"]) as server:
        assert await server.result("boxed", text="hi", n=2) == ["hi", "hi"]
        stream = await server.run("boxed", text="a", n=3, stream=True)
        assert stream.text.count('data: {"response":"a"') == 3
        data = "data:text/plain;base64," + base64.b64encode(b"in a file").decode()
        assert await server.result("boxed", act="file", file=data) == ["in a file"]
        assert (await server.run("boxed", n=9)).status_code == 400
        for act, message in (("outside", "No such file"), ("fail", "cannot do it")):
            assert message in await server.error("boxed", act=act, text="it")
        assert "after a while" in (await server.run("boxed", act="fork")).text
        printed = (await server.run("boxed", act="print")).json()
        assert "the secret is **********" in printed["logs"]

        async def answers() -> bool:
            return (await server.run("boxed", text="again")).status_code == 200

        assert "No space left" in await server.error("boxed", act="fill")
        await until(lambda: server.problem("boxed"))
        assert "its scratch space is full, and is emptied" in await server.problem("boxed")
        await until(answers)
        assert re.search("more than its 512 MiB of memory", await server.error("boxed", act="leak"))

        async def is_told() -> bool:
            return "more than its 512 MiB of memory" in await server.problem("boxed")

        await until(is_told)
        await until(answers)
        for path in Path("/proc").glob("[0-9]*/cmdline"):  # kill -9 of the worker: its container ends with it
            command = path.read_bytes() if path.exists() else b""
            if b"emberline.predictor.worker" in command and str(tmp_path).encode() in command:
                os.kill(int(path.parent.name), signal.SIGKILL)
        await until(answers)
        await server.root.post("/api/models/unload", json={"model": "@me/boxed"})
        assert (await server.states())["@me/boxed"] == "on_disk"
        left = await asyncio.to_thread(find_engine("podman").ask, "ps", "--all", "--quiet")
        assert not left.stdout, "a model that is scaled to zero keeps no container"
        assert await answers(), "it comes back when it is asked for"
