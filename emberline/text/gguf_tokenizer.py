"""The tokenizer that a GGUF file carries in its metadata."""

import re
from collections.abc import Mapping, Sequence

from tokenizers import AddedToken, models, normalizers

from emberline.text.pretokenizers import RECIPES, pre_tokenizer
from emberline.text.tokenizer import Parts
from emberline.weights.errors import BadCheckpoint
from emberline.weights.fields import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
MAX_UNCUTTABLE = 16
MAX_TOKEN_CHARS = 1024  # real vocabularies stay far below; work on a token may grow with its square


def gguf_parts(metadata: Mapping[str, object]) -> Parts:
    fields = Fields(metadata, "the metadata").under("tokenizer.ggml.")
    if not fields.has("model") or not fields.has("tokens"):
        raise BadCheckpoint("the file carries no tokenizer (tokenizer.ggml.model and .tokens)")
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
        raise BadCheckpoint(f"tokenizer.ggml.pre is {name!r}, a way to cut words that is not known here")
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
    """SentencePiece joins the pair whose whole scores best: every way to halve every piece, best piece first.

    Of one piece's halvings the longest left half comes first: in a run of equals, the leftmost pair is joined.
    """
    return [
        (left, right)
        for token in sorted(pieces, key=lambda token: -scores[pieces[token]])
        for at in range(len(token) - 1, 0, -1)
        if (left := token[:at]) in pieces and (right := token[at:]) in pieces
    ]


def _uncuttable(tokens: Sequence[str]) -> str | None:
    """The characters that some token joins to a following space; None when too many, or when one spans lines."""
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
    """Of a token that is listed twice, the first is used; some converters fill a vocabulary up like that."""
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
