"""Single keys of emberline.toml changed in place."""

import tomllib
from pathlib import Path

import pytest

from emberline.cli.config_edit import difference, edited, replace_file
from emberline.protocol.errors import BadInput

TEXT = """# our server
[engine]
replicas = 4  # one a GPU
models = [
    "smollm2",
]

[kv]  # tiers
"host_bytes" = 5

[[endpoints]]
name = "far"
"""


def test_keys_are_replaced_and_added_and_all_else_stays() -> None:
    text = edited(TEXT, {("engine", "replicas"): 0, ("engine", "prefill_workers"): 2, ("queue", "capacity_share"): 1})
    assert tomllib.loads(text) == {
        "engine": {"replicas": 0, "models": ["smollm2"], "prefill_workers": 2},
        "kv": {"host_bytes": 5},
        "endpoints": [{"name": "far"}],
        "queue": {"capacity_share": 1},
    }
    assert "# our server" in text
    assert "replicas = 0  # one a GPU" in text
    assert "+prefill_workers = 2" in difference(Path("emberline.toml"), TEXT, text)


def test_an_empty_file_gets_its_sections() -> None:
    assert edited("", {("engine", "speculation"): "off"}) == '[engine]\nspeculation = "off"\n'


@pytest.mark.parametrize("text", ["engine = { replicas = 4 }\n", "engine.replicas = 4\n", "[engine\n"])
def test_what_cannot_be_changed_line_by_line_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="cannot be changed automatically"):
        edited(text, {("engine", "replicas"): 2})


def test_a_quoted_key_is_refused_rather_than_set_twice() -> None:
    with pytest.raises(BadInput, match="cannot be changed automatically"):
        edited(TEXT, {("kv", "host_bytes"): 7})


def test_the_version_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "home" / "emberline.toml"
    assert replace_file(path, "[engine]\n") is None
    path.chmod(0o640)
    backup = replace_file(path, "[kv]\n")
    assert backup is not None
    assert (path.read_text(), backup.read_text()) == ("[kv]\n", "[engine]\n")
    assert (path.stat().st_mode & 0o777, backup.stat().st_mode & 0o777) == (0o640, 0o640)
    assert sorted(each.name for each in path.parent.iterdir()) == sorted([path.name, backup.name])
