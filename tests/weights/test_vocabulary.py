"""Hashes of vocabularies: equal for the same tokens, however they are stored or padded."""

import json

import pytest

from emberline.weights import vocabulary
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.vocabulary import vocabulary_hash

TOKENS = ["<s>", "a", "b", "ab", "▁"]


def folder_of(path, tokens=TOKENS, added=(), unigram=False):
    path.mkdir()
    vocab = [[token, 0.0] for token in tokens] if unigram else {token: n for n, token in enumerate(tokens)}
    document = {"model": {"vocab": vocab}, "added_tokens": [{"id": n, "content": text} for n, text in added]}
    (path / "tokenizer.json").write_text(json.dumps(document))
    return path


class File:
    def __init__(self, tokens, types):
        self.metadata = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}

    def close(self):
        pass


def test_the_same_tokens_have_one_hash_in_every_format(tmp_path, monkeypatch):
    plain = vocabulary_hash(folder_of(tmp_path / "plain"))
    assert vocabulary_hash(folder_of(tmp_path / "unigram", unigram=True)) == plain
    assert vocabulary_hash(folder_of(tmp_path / "added", TOKENS[:-1], [(4, TOKENS[4])])) == plain
    file = File([*TOKENS, "[PAD5]", "[PAD6]"], [3, 1, 1, 1, 1, 5, 5])
    monkeypatch.setattr(vocabulary.GGUFFile, "open", lambda path: file)
    assert vocabulary_hash(tmp_path / "m.gguf") == plain


def test_other_tokens_have_another_hash(tmp_path):
    (tmp_path / "kimi").mkdir()
    (tmp_path / "kimi" / "tiktoken.model").write_text("YQ== 0\nYg== 1\n")
    folders = [
        folder_of(tmp_path / "plain"),
        folder_of(tmp_path / "swapped", ["<s>", "b", "a", "ab", "▁"]),
        folder_of(tmp_path / "more", added=[(5, "<tool>")]),
        folder_of(tmp_path / "less", TOKENS[:-1]),
        tmp_path / "kimi",
    ]
    assert len({vocabulary_hash(folder) for folder in folders}) == len(folders)


@pytest.mark.parametrize("document", [{}, {"model": []}, {"model": {"vocab": {"a": "x"}}}, {"model": {"vocab": [1]}}])
def test_a_folder_without_a_vocabulary(tmp_path, document):
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(BadCheckpoint, match="vocabulary"):
        vocabulary_hash(tmp_path)
