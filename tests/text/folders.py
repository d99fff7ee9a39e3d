"""Hugging Face model folders, as their tokenizers' makers lay them out."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from emberline.text.tokenizers.gguf_tokenizer import LLAMA3
from tests.text.vocab import byte_level, sentencepiece


def write_folder(folder: Path, tokenizer: Tokenizer, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def llama3() -> Tokenizer:
    """Byte-level BPE; the beginning of sequence comes from a post-processor."""
    metadata = byte_level("llama-bpe", ())
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"])
    begin = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[begin])
    return tokenizer


def _sentencepiece(special: list[str]) -> Tokenizer:
    metadata = sentencepiece(special)
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    pieces = [token for token in vocab if len(token) > 1 and vocab[token] > 256 + len(special)]
    merges = [(p[:n], p[n:]) for p in pieces for n in range(len(p) - 1, 0, -1) if p[:n] in vocab and p[n:] in vocab]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    plain = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer


def llama2_legacy() -> Tokenizer:
    """A space before every piece of text between special tokens, which are matched in normalized text."""
    tokenizer = _sentencepiece(["<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens([AddedToken(text, normalized=True, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def mistral() -> Tokenizer:
    """A space before the first piece of text only."""
    tokenizer = _sentencepiece(["<s>", "</s>", "[INST]", "[/INST]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    return tokenizer


def phi3() -> Tokenizer:
    """Special tokens that swallow the white space after them."""
    tokenizer = _sentencepiece(["<s>", "<|user|>", "<|assistant|>", "<|end|>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    turns = ("<|user|>", "<|assistant|>", "<|end|>")
    tokenizer.add_special_tokens([AddedToken(text, rstrip=True, normalized=False, special=True) for text in turns])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST]' + message['content'] + '[/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
