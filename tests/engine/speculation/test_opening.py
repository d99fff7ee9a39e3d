"""A worker with a draft model: it drafts for a model of the same tokenizer, and others are refused or left out."""

import json
import re
import shutil

import pytest

from emberline.engine.speculation.opening import check_draft_model
from emberline.engine.worker import main as worker
from emberline.protocol.errors import BadInput
from tests.engine.fakes import request
from tests.engine.runners.cpu.test_torch_runner import run, tokens
from tests.engine.training.test_head_training import VOCAB, write_model


def model_in(folder, seed, prefix="t"):
    write_model(folder, seed)
    vocab = {f"{prefix}{n}": n for n in range(VOCAB)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return folder


def loop_of(model, *flags):
    flags = ["--model", str(model), "--socket", "unused", "--device", "cpu", "--kv-bytes", "4000000", *flags]
    return worker.build(worker.parse_arguments([*flags, "--threads", "1", "--max-running", "4"]))[0]


def replies(loop):
    asked = [request(str(n), [n + 3, 4, 5] * 7, max_tokens=60, temperature=0.8 * (n % 2), seed=n) for n in range(6)]
    return {id: tokens(each) for id, each in run(loop, *asked).items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "large": model_in(folder / "large", 0),
        "small": model_in(folder / "small", 1),
        "foreign": model_in(folder / "foreign", 2, prefix="u"),
    }


def test_two_models_of_one_tokenizer(models):
    plain = replies(loop_of(models["large"], "--speculation", "off"))
    drafting = ("--speculation", "draft_model", "--draft-model")
    assert replies(loop_of(models["large"], *drafting, str(models["small"]))) == plain
    itself = loop_of(models["large"], *drafting, str(models["large"]))
    for _ in range(10):  # until it was tried
        assert replies(itself) == plain
        if itself.load.drafts:
            break
    stats = itself.load.drafts[0]
    assert stats.drafter == "draft_model"
    assert sum(stats.accepted) == sum(stats.drafted) > 0


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("foreign", r"--draft-model foreign has another tokenizer than large \(vocabularies \w{16} and \w{16}\)"),
        ("missing", "no such file or folder"),
    ],
)
def test_one_that_does_not_fit(models, draft, says, caplog):
    flags = "--draft-model", str(models.get(draft, models["large"].with_name(draft)))
    assert len(replies(loop_of(models["large"], *flags))) == 6
    assert re.search(f"no draft model: .*{says}", caplog.text)
    with pytest.raises(BadInput, match=says):
        loop_of(models["large"], *flags, "--speculation", "draft_model")


def test_a_model_among_others_does_not_draft_for_itself(models, caplog):
    assert len(replies(loop_of(models["large"], "--draft-model", str(models["large"])))) == 6
    assert "large is the model itself" in caplog.text


def test_what_else_is_refused(models, tmp_path):
    with pytest.raises(BadInput, match=r"small needs about 0.0 GiB of memory beside large, and 0.0 GiB are free"):
        check_draft_model(models["small"], models["large"], 1000)
    with pytest.raises(BadInput, match=r"--draft-model does not work with --draft-head: .*give one of them"):
        loop_of(models["large"], "--draft-model", str(models["small"]), "--draft-head", str(tmp_path))
    with pytest.raises(BadInput, match="needs a model: --draft-model PATH"):
        loop_of(models["large"], "--speculation", "draft_model")
    encoder = shutil.copytree(models["small"], tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text())
    (encoder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"], "model_type": "bert"}))
    with pytest.raises(BadInput, match="encoder does not write text"):
        check_draft_model(encoder, models["large"], 1 << 40)
