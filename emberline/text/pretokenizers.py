"""How text is cut into words before byte-level BPE: one recipe for each name that GGUF files use."""

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+|"
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words that end where small letters turn into capitals."""
    letters = f"{_BEFORE}{_UPPER}*{_LOWER}+{suffix}|{_BEFORE}{_UPPER}+{_LOWER}*{suffix}|"
    return letters + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES


DIGIT = r"\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}{1,3}|" + _SYMBOLS + _SPACES
QWEN2 = _CONTRACTIONS + "|" + _LETTERS + r"\p{N}|" + _SYMBOLS + _SPACES
QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES
TEKKEN = _cased("", DIGIT)
GPT4O = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")

# None of these ever joins what stands on the two sides of a single space, or of a single line break: see words.py.
KNOWN_REGEXES = frozenset({GPT2, LLAMA3, QWEN2, QWEN35, TEKKEN, GPT4O, DIGIT})


class Recipe(NamedTuple):
    regexes: tuple[str, ...]  # applied one after the other
    nfc: bool = False  # text is brought to Unicode's composed form first
    ignore_merges: bool = False  # a word that is in the vocabulary whole is that one token
    add_bos: bool = False  # when the file does not say


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
    "default": _GPT2,  # also of files that predate the field
}


def pre_tokenizer(recipe: Recipe) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in recipe.regexes]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
