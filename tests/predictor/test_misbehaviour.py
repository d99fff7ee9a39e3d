"""Predictors that misbehave, on Cog's own server: each has its error in the reply, its log and the model's card."""

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from emberline.predictor.versions import PredictorVersions
from emberline.protocol.prediction import Resources
from emberline.supervisor.sandbox.protections import find_protections
from tests.predictor.conftest import write_project
from tests.predictor.test_serving import PIXEL, Serving, push, push_folder, serving, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_protections().bubblewrap, reason="needs bubblewrap: it is not here"),
]

RESOURCES = Resources(memory_bytes=512 << 20, scratch_bytes=64 << 20, cpus=2.0, setup_s=60.0, predict_s=60.0)
SECRET = "tell-nobody-123"
SOURCE = """import os, time
from cog import BaseRunner, Path

class Runner(BaseRunner):
    def setup(self) -> None:
        {setup}

    def run(self, go: bool = True) -> {output}:
        if not go:
            return {good}
        {body}
        return {good}
"""


class Case(NamedTuple):
    error: str  # in the reply, the log and the card
    body: str = "pass"
    setup: str = "pass"
    output: str = "str"
    good: str = "'well'"
    status: int = 500
    resources: Resources = RESOURCES


CASES = {
    "crash in setup": Case("the predictor.s setup failed|crashed in its setup", setup="os._exit(3)", status=503),
    "error in setup": Case("no weights here", setup="raise ValueError('no weights here')", status=503),
    "hang in setup": Case(
        "setup did not end within 4 s", setup="time.sleep(1000)", status=503, resources=replace(RESOURCES, setup_s=4.0)
    ),
    "crash": Case("the predictor crashed", "os._exit(3)"),
    "error": Case("cannot do this", "raise ValueError('cannot do this')"),
    "hang": Case("did not end within 3 s", "time.sleep(1000)", status=408, resources=replace(RESOURCES, predict_s=3.0)),
    "leak": Case("more than its 512 MiB of memory|the predictor crashed", "held = [b'x' * n for n in range(1 << 24)]"),
    "fork": Case(
        "Resource temporarily unavailable",
        "while os.fork(): pass\n        time.sleep(9); os._exit(0)",
        resources=replace(RESOURCES, n_processes=128),
    ),
    "10 GB": Case("No space left on device|File too large", "open('/tmp/f', 'wb').write(b'x' * (256 << 20))"),
    "secret": Case("printed a secret that it was granted", "print('it is', os.environ['TOKEN'])", status=200),
    "flood": Case("printed more than 64 KiB", "print(('x' * 80 + chr(10)) * 200_000)", status=200),
    "path of the machine": Case("`output` is no file", "return Path('/etc/shadow')", output="Path", good="None"),
    "path as a text": Case("`output` is no file", "return '/etc/passwd'", output="Path", good="None"),
    "lie about a type": Case("`output` must be of type integer", "return 'text'", output="int", good="1"),
    "lie about an element": Case("`output` must be of type string", "return [1]", output="list[str]", good="['a']"),
    "no JSON": Case("the predictor failed", "return object()"),
}


def push_case(case: Case, versions: PredictorVersions, tmp_path: Path) -> None:
    code = SOURCE.format(setup=case.setup, output=case.output, good=case.good, body=case.body)
    folder = write_project(tmp_path / "bad", code)
    push_folder(versions, tmp_path, folder, name="bad", secrets=("TOKEN",), resources=case.resources)


@pytest.mark.parametrize("name", CASES)
async def test_an_error_is_in_the_reply_the_log_and_the_card(
    name: str, versions: PredictorVersions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBERLINE_GRANT_TOKEN", SECRET)
    case = CASES[name]
    push_case(case, versions, tmp_path)
    push(versions, tmp_path, "good", "picture")
    async with serving(versions, tmp_path, ["good"]) as server:
        failing = asyncio.create_task(server.run("bad"))
        assert (await server.run("good", image=PIXEL)).status_code == 200
        reply = await failing
        log = tmp_path / "home" / "predictors" / "bad" / "v1" / "logs" / "log"
        assert (reply.status_code, bool(re.search(case.error, reply.text))) == (case.status, True), reply.text
        assert re.search(case.error, log.read_text())
        await until(lambda: shows(server, case.error))
        assert await server.problem("good") == ""
        for text in (reply.text, log.read_text(), await server.problem("bad")):
            assert SECRET not in text
            assert len(text) < 1 << 17
        if case.setup == "pass" and case.good != "None":
            await until(lambda: succeeds(server))


async def shows(server: Serving, error: str) -> bool:
    return bool(re.search(error, await server.problem("bad")))


async def succeeds(server: Serving) -> bool:
    return (await server.run("bad", go=False)).status_code == 200
