"""Cog projects as their authors write them, and what is refused by name."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from emberline.predictor.environments import find_interpreter
from emberline.predictor.project import read_project
from emberline.predictor.versions import PredictorVersions, PushSettings
from emberline.protocol.errors import BadInput, EmberlineError, ModelNotFound, TooLarge, Unsupported
from tests.predictor.conftest import write_project

SOURCE = "class Runner:\n    def run(self, a: str) -> str:\n        return a\n"


def test_a_project_is_read(tmp_path: Path) -> None:
    config = """
build:
  python_version: "3.11"
  gpu: true
  cuda: "12.4"
  system_packages: [ffmpeg, "libgl1=1.6.0-1"]
  python_requirements: requirements.txt
  python_packages: ["numpy==2.0"]
concurrency: {max: 2}
environment: ["A=b=c"]
train: "train.py:train"
observability: {traces: true}
image: r8.im/me/Thing:1
"""
    folder = write_project(tmp_path / "p", SOURCE, config=config)
    requirements = "# of the model\npillow>=10 # images\ntorch[cpu]==2.1 ; sys_platform == 'linux'\n"
    (folder / "requirements.txt").write_text(requirements)
    (tmp_path / "ffmpeg.list").touch()
    (tmp_path / "libgl1:amd64.list").touch()
    project = read_project(folder, packages=tmp_path)
    assert project.requirements == ("pillow>=10", "torch[cpu]==2.1 ; sys_platform == 'linux'", "numpy==2.0")
    assert (project.python, project.gpu, project.max_concurrency) == ("3.11", True, 2)
    assert project.environment == {"A": "b=c"}
    assert [notice.partition(":")[0] for notice in project.notices] == [
        "`train` is left out",
        "`observability` is left out",
    ]


@pytest.mark.parametrize(("written", "version"), [('"3.12"', "3.12"), ("3.12", "3.12"), ("3.10", "3.10")])
def test_a_version_of_python_may_be_a_number(written: str, version: str, tmp_path: Path) -> None:
    """YAML reads 3.10 without quotes as 3.1."""
    folder = write_project(tmp_path / "p", SOURCE, config=f"build: {{python_version: {written}}}")
    assert read_project(folder).python == version


def test_interpreters_beside_our_own_are_found(tmp_path: Path) -> None:
    found = tmp_path / "3.99.1" / "bin" / "python3.99"
    found.parent.mkdir(parents=True)
    found.write_text(f'#!/bin/sh\necho \'[[3, 99], "{tmp_path}/3.99.1", "{found}"]\'\n')
    found.chmod(0o755)
    assert find_interpreter("3.99", beside=tmp_path).path == str(found)
    with pytest.raises(Unsupported, match=r"wants Python 3\.98, which is not on this machine: install it"):
        find_interpreter("3.98", beside=tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("build: {system_packages: [no-such]}", "packages that this machine does not have: no-such. Install them"),
        ("build: {system_packages: ['../x']}", "packages that this machine does not have"),
        ("build: {run: [make]}", "`build.run` runs commands in a container builder"),
        ("build: {python_version: [3]}", "must be text"),
        ("build: {python_version: '3.8'}", "needs Python 3.10 or newer, not 3.8"),
        ("build: {python_packages: ['git+https://x/y']}", "addresses, paths and options of pip are not followed"),
        ("build: {python_packages: ['--index-url=http://x']}", "not a package's name"),
        ("build: {python_packages: ['x @ file:///etc']}", "not a package's name"),
        ('build: {python_packages: ["six; a<b\\n--no-binary :all:\\n/tmp/x"]}', "not a package's name"),
        ('build: {python_packages: ["six\\n==1"]}', "not a package's name"),
        ("build: {python_packages: ['six; a<b --config-settings=x=y']}", "not a package's name"),
        ("build: {python_packages: ['six==${SECRET}']}", "not a package's name"),
        ("build: {python_requirements: ../secret}", "is not a file of the project"),
        ("environment: [LD_PRELOAD=x]", "LD_PRELOAD is set by the server"),
        ("concurrency: {max: -1}", "from 1 to 256"),
        ("run: '../x.py:Runner'", "is not a file of the project"),
        ("x: [", "is not YAML"),
        (f"a: &a [x]\nbuild: {{python_packages: [{', '.join(['*a'] * 17)}]}}", "more than 16 aliases"),
        ("x: &a [*a, *a]\nrun: 3", "must name a file and a class"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(config: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("numpy\n")
    with pytest.raises(EmberlineError, match=message):
        read_project(write_project(tmp_path / "p", SOURCE, config=config))


def test_a_folder_that_is_no_project(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is not a Cog project"):
        read_project(tmp_path)
    (tmp_path / "cog.yaml").write_text('train: "train.py:train"\n')
    with pytest.raises(BadInput, match="training is not supported"):
        read_project(tmp_path)


@pytest.mark.slow
def test_versions_are_numbered_and_kept(versions: PredictorVersions, tmp_path: Path) -> None:
    folder = write_project(tmp_path / "p", SOURCE)
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("x")
    first = versions.push(folder, PushSettings(name="thing"), lambda line: None)
    again = versions.push(folder, PushSettings(name="thing"), lambda line: None)
    (folder / "run.py").write_text(SOURCE.replace("return a", "return a + a"))
    second = versions.push(folder, PushSettings(name="thing"), lambda line: None)
    assert [each.version for each in versions.list("@me/thing")] == [1, 2, 3]
    assert first.digest == again.digest != second.digest
    assert not (versions.path(first).parent / "src" / ".git").exists()
    assert (versions.path(first).parent / "src" / "run.py").read_text() == SOURCE
    assert versions.find("@me/thing", 3) == second
    with pytest.raises(ModelNotFound, match="has no version 9; there are 1, 2, 3"):
        versions.find("@me/thing", 9)
    with pytest.raises(ModelNotFound):
        versions.list("@me/../x")


@pytest.mark.slow
def test_pushes_of_a_model_at_once_are_versions_of_their_own(versions: PredictorVersions, tmp_path: Path) -> None:
    folders = [write_project(tmp_path / f"p{n}", SOURCE.replace("return a", f"return a * {n}")) for n in range(4)]
    for folder in folders:
        for n in range(50):
            (folder / f"data{n}").write_text(folder.name)
    with ThreadPoolExecutor() as pool:
        pushed = list(pool.map(lambda folder: versions.push(folder, PushSettings(name="thing"), print), folders))
    assert sorted(each.version for each in pushed) == [1, 2, 3, 4]
    for folder, each in zip(folders, pushed, strict=True):
        source = versions.path(each).parent / "src"
        assert (source / "run.py").read_text() == (folder / "run.py").read_text()
        assert {path.read_text() for path in source.glob("data*")} == {folder.name}


@pytest.mark.slow
def test_a_push_that_is_refused_leaves_nothing(versions: PredictorVersions, tmp_path: Path) -> None:
    folder = write_project(tmp_path / "p", SOURCE)
    with pytest.raises(TooLarge, match="more than 10 bytes or"):
        versions.push(folder, PushSettings(max_bytes=10), lambda line: None)
    (folder / "link").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match="link that leads out of the project"):
        versions.push(folder, PushSettings(), lambda line: None)
    slots = "class Runner:\n    @concurrent(max=2)\n    def run(self) -> str: ...\n"
    with pytest.raises(Unsupported, match="need `async def`"):
        versions.push(write_project(tmp_path / "q", slots), PushSettings(), lambda line: None)
    assert versions.list("@me/p") == versions.list("@me/q") == []
    assert not list((tmp_path / "home" / "predictors").glob("*/.push*"))
