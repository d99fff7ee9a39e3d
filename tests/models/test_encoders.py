"""Encoders against transformers: hidden states and classification logits of small random models, packed without
padding; and vectors of a decoder used as an embedder."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from emberline.models.bert import Bert
from emberline.models.encoder import PackedTexts, pool
from emberline.models.registry import load_encoder
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.task_config import task_of
from tests.lazy_modules import transformers

SMALL = dict(
    vocab_size=203,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=80,
)
DISTIL = dict(vocab_size=203, dim=64, hidden_dim=96, n_layers=3, n_heads=4, max_position_embeddings=80)
CONFIGS = {
    "bert": lambda **more: transformers.BertConfig(**SMALL, **more),
    "roberta": lambda **more: transformers.RobertaConfig(**SMALL, pad_token_id=1, type_vocab_size=1, **more),
    "xlm-roberta": lambda **more: transformers.XLMRobertaConfig(**SMALL, pad_token_id=1, type_vocab_size=1, **more),
    "distilbert": lambda **more: transformers.DistilBertConfig(**DISTIL, **more),
}
LENS = [1, 17, 33, 5, 70]


def saved(folder: Path, model: torch.nn.Module) -> torch.nn.Module:
    """In `folder`, with every parameter random: the initial values of norms and biases would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    return model


def random_texts(vocab: int = 203) -> list[torch.Tensor]:
    return [torch.randint(5, vocab, (n,), generator=torch.Generator().manual_seed(n)) for n in LENS]


@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_hidden_states_match_transformers(kind: str, native: bool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = saved(tmp_path, transformers.AutoModel.from_config(CONFIGS[kind]()))
    ours = Bert(open_checkpoint(tmp_path), native=native)
    assert ours.backend == ("native" if native else "torch")
    tolerance = 1e-2 if native else 2e-4  # operands of the C kernels may be halves; values are around 1
    texts = random_texts()
    hidden = ours.hidden(PackedTexts(torch.cat(texts), LENS))
    for ids, mine in zip(texts, hidden.split(LENS), strict=True):
        with torch.no_grad():
            expected = theirs(input_ids=ids[None]).last_hidden_state[0]
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)
        vector, theirs_pooled = F.normalize(mine.mean(0), dim=0), F.normalize(expected.mean(0), dim=0)
        torch.testing.assert_close(vector, theirs_pooled, rtol=0, atol=2e-3)  # of 64 numbers, around 0.1
    task = task_of(tmp_path)
    assert (task.task, task.pooling, task.normalize) == ("embed", "mean", True)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("n_labels", [1, 3])
def test_classification_logits_match_transformers(kind: str, n_labels: int, tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = CONFIGS[kind](num_labels=n_labels)
    theirs = saved(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    ours = load_encoder(open_checkpoint(tmp_path))
    texts, seconds = random_texts(), [1, 9, 20, 2, 41]
    packed = PackedTexts(torch.cat(texts), LENS, seconds if kind == "bert" else None)
    hidden = ours.hidden(packed)
    logits = ours.logits(torch.stack([text[0] for text in hidden.split(LENS)]))
    for at, ids in enumerate(texts):
        types = {"token_type_ids": (torch.arange(len(ids)) >= seconds[at]).long()[None]} if kind == "bert" else {}
        with torch.no_grad():
            expected = theirs(input_ids=ids[None], **types).logits[0]
        torch.testing.assert_close(logits[at], expected, rtol=1e-2, atol=1e-2)
    assert task_of(tmp_path).task == ("rerank" if n_labels == 1 else "classify")
    assert len(task_of(tmp_path).labels) == n_labels


def test_decoder_embedder_matches_transformers(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
    theirs = saved(tmp_path, transformers.AutoModel.from_config(config))  # without an output matrix, as released
    modules = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in zip(paths, modules)]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    task = task_of(tmp_path)
    assert (task.task, task.pooling, task.matryoshka) == ("embed", "last", True)
    ours = load_encoder(open_checkpoint(tmp_path))
    texts = random_texts()
    mine = pool(ours.hidden(PackedTexts(torch.cat(texts), LENS)), LENS, [task.pooling] * len(LENS))
    for ids, vector in zip(texts, mine, strict=True):
        with torch.no_grad():
            expected = theirs(input_ids=ids[None]).last_hidden_state[0, -1]
        normed = torch.nn.functional.normalize
        torch.testing.assert_close(normed(vector, dim=0), normed(expected, dim=0), rtol=0, atol=1e-3)


def test_results_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Nor on the number of threads: every token gets the same operations."""
    torch.manual_seed(6)
    saved(tmp_path, transformers.AutoModel.from_config(CONFIGS["bert"]()))
    texts = random_texts()
    together = Bert(open_checkpoint(tmp_path), threads=2).hidden(PackedTexts(torch.cat(texts), LENS))
    alone = Bert(open_checkpoint(tmp_path), threads=1)
    for ids, mine in zip(texts, together.split(LENS), strict=True):
        assert torch.equal(alone.hidden(PackedTexts(ids, [len(ids)])), mine)


def test_pooling() -> None:
    hidden = torch.arange(12.0).view(6, 2)
    pooled = pool(hidden, [1, 2, 3], ["cls", "mean", "last"])
    assert pooled.tolist() == [[0, 1], [3, 4], [10, 11]]


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        ("Dense", {"pooling_mode_mean_tokens": True}, "Dense"),
        ("Normalize", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("Normalize", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "supported is one of"),
    ],
)
def test_unsupported_modules_are_named(tmp_path: Path, modules: str, pooling: dict[str, bool], why: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    listed = [{"path": "1_Pooling", "type": "a.Pooling"}, {"path": "2", "type": f"a.{modules}"}]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with pytest.raises(BadCheckpoint, match=why):
        task_of(tmp_path)
