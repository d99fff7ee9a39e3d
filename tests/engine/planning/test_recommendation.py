"""The process that finds the layout for `serve --gpus auto`: one line, a layout or why there is none."""

import json

import pytest

from emberline.engine.planning.recommendation import main
from tests.catalog.tiny_models import folder_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    for name, content in folder_files().items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    return path


def said(capsys, *flags):
    code = main([*map(str, flags)])
    (line,) = capsys.readouterr().out.splitlines()
    return code, json.loads(line)


def test_a_layout_is_printed(folder, capsys):
    code, found = said(capsys, "--model", folder, "--gpus", "2xH100", "--max-running", 8)
    assert code == 0
    assert found["layout"]["tp"] in (1, 2)
    code, found = said(capsys, "--model", folder, "--gpus", "2xH100", "--workers", "1:1")
    assert (code, found["layout"]["tp"]) == (0, 1), "each of the two workers has one GPU"


def test_why_there_is_none(folder, tmp_path, capsys):
    code, found = said(capsys, "--model", folder, "--gpus", "100")
    assert code == 1
    assert "of 100 GPUs" in found["error"]
    assert "known are" in said(capsys, "--model", folder, "--gpus", "2xH99")[1]["error"]
    assert said(capsys, "--model", tmp_path / "none", "--gpus", "2xH100")[0] == 1
