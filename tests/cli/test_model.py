"""`emberline model`: cards and aliases from the command line."""

import json
from pathlib import Path

import pytest

from emberline.cli.main import main
from tests.cli.fake_server import FakeServer

CARD = """
id = "@cf/huggingfacetb/smollm2-135m-instruct"
deprecation_date = "2027-03-31"
[price]
input = 600_000
output = 3_000_000
"""
REMOVED = "/api/aliases/%40cf/moonshotai/kimi-k2.5"


@pytest.fixture
def server(fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    """A server with two aliases."""
    rows = [
        {"name": "fixed", "targets": {"smollm2": 1}, "configured": True},
        {"name": "gpt-4o", "targets": {"smollm2": 90, "qwen2.5-coder": 10}, "configured": False},
    ]
    for path in ("/api/aliases", REMOVED):
        fake_server.answers[path] = {"aliases": rows}
    monkeypatch.setenv("EMBERLINE_PORT", fake_server.port)
    return fake_server


def test_a_card_is_checked_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "card.toml").write_text(CARD)
    home = ("--data-dir", str(tmp_path / "home"))
    assert main(["model", "add", str(tmp_path / "card.toml"), *home]) == 0
    capsys.readouterr()
    assert main(["model", "show", "SmolLM2", "--json", *home]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["deprecation_date"], shown["price"]["input"], shown["path"]) == ("2027-03-31", 600_000, None)
    assert main(["model", "show", "minilm", *home]) == 0
    assert "output_dimensions: 384" in capsys.readouterr().out
    assert main(["model", "ls", *home]) == 0
    (tmp_path / "card.toml").write_text("id = 1")
    assert main(["model", "add", str(tmp_path / "card.toml"), *home]) == 1
    assert main(["model", "show", "nothing", *home]) == 1
    assert "`emberline ls --all` lists them" in capsys.readouterr().err


def test_show_knows_what_plan_knows(
    tmp_path: Path, smollm2: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(name: str) -> dict[str, object]:
        assert main(["model", "show", name, "--json", "--data-dir", str(tmp_path / "home")]) == 0
        return dict(json.loads(capsys.readouterr().out))

    shape, repo, file, folder = map(show, ("llama-3.1-8b", "hf:Qwen/Qwen3-30B-A3B", str(smollm2), str(tiny_model)))
    assert (shape["n_parameters"], shape["quantization"], shape["path"]) == (8_030_261_248, "BF16", None)
    assert (shape["weight_bytes"], shape["architecture"]) == (16_060_522_496, "llama")
    assert repo["id"] == "@hf/qwen/qwen3-30b-a3b"
    assert (file["n_parameters"], file["quantization"], file["path"]) == (134_515_008, "Q4_1", str(smollm2))
    assert (folder["architecture"], folder["path"]) == ("llama", str(tiny_model))
    assert main(["model", "show", "lama-3.1", "--data-dir", str(tmp_path / "home")]) == 1
    assert "no model is called 'lama-3.1'; did you mean llama3.1" in capsys.readouterr().err


def test_aliases(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "alias"]) == 0
    assert "smollm2 90 %, qwen2.5-coder 10 %" in capsys.readouterr().out
    assert main(["model", "alias", "gpt-4o", "smollm2=90", "@cf/qwen/qwen2.5-coder-1.5b-instruct=10"]) == 0
    assert main(["model", "alias", "@cf/moonshotai/kimi-k2.5", "--remove"]) == 0
    targets = {"smollm2": 90, "@cf/qwen/qwen2.5-coder-1.5b-instruct": 10}
    assert [(path, json.loads(body)) for path, _, body in server.posts] == [
        ("/api/aliases", {"name": "gpt-4o", "targets": targets})
    ]
    assert server.deleted == [REMOVED]
    assert main(["model", "alias", "gpt-4o", "smollm2=most"]) == 1
    assert main(["model", "alias", "--remove"]) == 1
    assert "MODEL=WEIGHT" in capsys.readouterr().err
