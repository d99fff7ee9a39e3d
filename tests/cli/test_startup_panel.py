"""What `serve` prints when it is ready."""

from pathlib import Path

import pytest

from emberline.catalog.model_store import ModelEntry
from emberline.cli import startup_panel
from emberline.config import resolve
from emberline.server.address import ServerAddress
from tests.api.fake_service import CARDS


@pytest.mark.parametrize("mode", ["keys", "none"])
def test_with_keys_the_panel_says_how_to_make_one(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = resolve({"server.auth": mode}, environ={}, home=tmp_path / "a folder")
    startup_panel.show(config, ServerAddress.of(config), [ModelEntry(CARDS[0], tmp_path)], [], 1.0)
    shown = capsys.readouterr().out
    command = f"emberline key create --account me --data-dir '{tmp_path}/a folder'"
    assert (command in shown) is (mode == "keys")
    assert ("Authorization: Bearer <key>" in shown) is (mode == "keys")
