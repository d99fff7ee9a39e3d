"""Reads the tokenizer from the metadata of a GGUF file."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from emberline.text.tokenizers.tokenizer import Parts
from emberline.weights.model_config import BadCheckpoint, Fields

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str, behind: str = r"[\r\n/]*", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Words that end where lower case changes to upper case; `behind`: what symbols take along."""
    letters = f"{_BEFORE}{upper}*{lower}+{suffix}|{_BEFORE}{upper}+{lower}*{suffix}|"
    return letters + digits + r"| ?[^\s\p{L}\p{N}]+" + behind + "|" + _SPACES


def _not_han(letters: str) -> str:
    return letters[:-1] + r"&&[^\p{Han}]]"


DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}{1,3}|" + _SYMBOLS + _SPACES
QWEN2 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}|" + _SYMBOLS + _SPACES
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
TEKKEN = _cased("", DIGIT)
GPT4O = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")
# Kimi's: as GPT-4o's, but Chinese characters are words apart.
KIMI = r"[\p{Han}]+|" + _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}", r"[\r\n]*", _not_han(_UPPER), _not_han(_LOWER))

# None of these joins the two sides of a single space or of a single line break: see `WordCache`.
KNOWN_REGEXES = frozenset({GPT2, LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, KIMI, DIGIT})


class Recipe(NamedTuple):
    regexes: tuple[str, ...]  # applied in order
    nfc: bool = False  # Unicode normalization form C is applied first
    ignore_merges: bool = False  # a word that is in the vocabulary is one token
    add_bos: bool = False  # if the file does not say


_GPT2 = Recipe((GPT2,))
_DIGITS = Recipe((DIGIT, GPT2))
_LLAMA3 = Recipe((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = Recipe((QWEN2,), nfc=True)

RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Recipe((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "stablelm2": Recipe((QWEN2,)),
    "qwen35": Recipe((QWEN35,), nfc=True),
    "tekken": Recipe((TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), Recipe((GPT4O,))),
    "default": _GPT2,  # also for files without the field
}


def pre_tokenizer(recipe: Recipe) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in recipe.regexes]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
MAX_UNCUTTABLE = 16
MAX_TOKEN_CHARS = 1024  # real vocabularies stay far below; the work per token may be quadratic


def gguf_parts(metadata: Mapping[str, object]) -> Parts:
    fields = Fields(metadata, "the metadata").under("tokenizer.ggml.")
    if not fields.has("model") or not fields.has("tokens"):
        raise BadCheckpoint("the file contains no tokenizer (tokenizer.ggml.model and .tokens)")
    kind = fields.text("model")
    if kind == "gpt2":
        return _byte_level(fields)
    if kind == "llama":
        return _sentencepiece(fields)
    raise BadCheckpoint(
        f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
    )


def _byte_level(fields: Fields) -> Parts:
    name = fields.text("pre", "default")
    recipe = RECIPES.get(name)
    if recipe is None:
        raise BadCheckpoint(f"tokenizer.ggml.pre is {name!r}, an unsupported pre-tokenizer")
    tokens = _strings(fields, "tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _strings(fields, "merges"))]
    try:
        model = models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=recipe.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise BadCheckpoint(f"the tokenizer's merges do not fit its vocabulary: {error}") from None
    return Parts(
        model=model,
        normalizer=normalizers.NFC() if recipe.nfc else None,
        pre_tokenizer=pre_tokenizer(recipe),
        added=_added(fields, tokens),
        spelling="bytelevel",
        vocab_size=len(tokens),
        bos_id=_bos_id(fields, len(tokens)),
        add_bos=fields.flag("add_bos_token", recipe.add_bos),
        prefix_space="never",
        uncuttable="",
    )


def _sentencepiece(fields: Fields) -> Parts:
    tokens = _strings(fields, "tokens")
    types, scores = _numbers(fields, "token_type", len(tokens)), _numbers(fields, "scores", len(tokens))
    vocab = _vocabulary(tokens)
    pieces = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    merges = _merges(pieces, scores)
    unknown = tokens[fields.whole("unknown_token_id", 0, least=0, most=len(tokens) - 1)]
    spaces = normalizers.Replace(" ", "▁")
    prefixed = fields.flag("add_space_prefix", True)
    return Parts(
        model=models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces,
        pre_tokenizer=None,
        added=_added(fields, tokens),
        spelling="metaspace",
        vocab_size=len(tokens),
        bos_id=_bos_id(fields, len(tokens)),
        add_bos=fields.flag("add_bos_token", True),
        prefix_space="always" if prefixed else "never",
        unspaced=spaces,
        uncuttable=_uncuttable(tokens),
    )


def _merges(pieces: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores best: every split of every piece, best piece first.

    Of the splits of one piece the longest left part comes first, so that in a run of equal characters the leftmost
    pair is merged.
    """
    return [
        (left, right)
        for token in sorted(pieces, key=lambda token: -scores[pieces[token]])
        for at in range(len(token) - 1, 0, -1)
        if (left := token[:at]) in pieces and (right := token[at:]) in pieces
    ]


def _uncuttable(tokens: Sequence[str]) -> str | None:
    """The characters that some token joins to a following space; None if there are too many, or a token spans lines."""
    everything = "\0".join(tokens)
    if re.search(r"\n[^\n\0]", everything):
        return None
    before_space = set(re.findall(r"([^▁ \0])[▁ ]", everything)) - {"\n"}
    return "▁" + "".join(sorted(before_space)) if len(before_space) <= MAX_UNCUTTABLE else None


def _added(fields: Fields, tokens: Sequence[str]) -> dict[int, AddedToken]:
    """Control tokens are special; user-defined ones are matched in any text, as the model was trained."""
    types = _numbers(fields, "token_type", len(tokens)) if fields.has("token_type") else [_NORMAL] * len(tokens)
    named = [fields.optional_id(f"{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown")]
    special = {index for index in named if index is not None and index < len(tokens) and types[index] != _USER_DEFINED}
    special |= {index for index, kind in enumerate(types) if kind in (_CONTROL, _UNKNOWN)}
    matched = sorted(special | {index for index, kind in enumerate(types) if kind == _USER_DEFINED})
    return {
        index: AddedToken(tokens[index], special=index in special, normalized=False)
        for index in matched
        if tokens[index]
    }


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Map tokens to their ids. The first counts of a token that is listed twice; some converters pad vocabularies with
    duplicates."""
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        raise BadCheckpoint(f"a token has {longest} characters, more than {MAX_TOKEN_CHARS}")
    return {token: index for index, token in reversed(list(enumerate(tokens)))}


def _bos_id(fields: Fields, n_tokens: int) -> int | None:
    return fields.whole("bos_token_id", least=0, most=n_tokens - 1) if fields.has("bos_token_id") else None


def _strings(fields: Fields, key: str) -> list[str]:
    value = fields.get(key)
    if not isinstance(value, list) or not value:
        raise fields.wrong(key, "a list of texts")
    return value


def _numbers(fields: Fields, key: str, count: int) -> list[float]:
    value = fields.get(key)
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, list) or len(numbers) != count:
        raise fields.wrong(key, f"a list of {count} numbers")
    return numbers
