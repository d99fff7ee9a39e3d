"""The vocabulary of a checkpoint's tokenizer, as a hash: models whose hashes are equal mean the same text by an id."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

from emberline.weights.gguf import GGUFFile
from emberline.weights.model_config import BadCheckpoint
from emberline.weights.task_config import read_json

_UNUSED = 5  # in tokenizer.ggml.token_type


def vocabulary_hash(model: Path) -> str:
    """Over the tokens by id, without the unused ids behind the last one: models of a family pad their matrices to
    different sizes. Raises BadCheckpoint where there is no tokenizer."""
    tokens = _folder_tokens(model) if model.is_dir() else _gguf_tokens(model)
    digest = blake2b(digest_size=8)
    for token_id in sorted(tokens):
        token = tokens[token_id].encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (token_id, len(token)) + token)
    return digest.hexdigest()


def _gguf_tokens(path: Path) -> dict[int, str]:
    file = GGUFFile.open(path)
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    file.close()
    if not isinstance(tokens, list) or not tokens:
        raise BadCheckpoint(f"{path.name} has no tokenizer (tokenizer.ggml.tokens)")
    kinds: Any = types if types is not None and len(types) == len(tokens) else [0] * len(tokens)  # type: ignore[arg-type]
    return {n: str(token) for n, (token, kind) in enumerate(zip(tokens, kinds)) if kind != _UNUSED}


def _folder_tokens(folder: Path) -> dict[int, str]:
    ranks = folder / "tiktoken.model"
    if not (folder / "tokenizer.json").is_file() and ranks.is_file():
        lines = (line.split() for line in ranks.read_text("ascii", "replace").splitlines())
        return {int(line[1]): line[0] for line in lines if len(line) == 2 and line[1].isdigit()}
    document = read_json(folder, "tokenizer.json")
    model, added = document.get("model"), document.get("added_tokens") or []
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list) or not isinstance(added, list):
        raise BadCheckpoint(f"{folder.name}: tokenizer.json has no vocabulary")
    try:
        if isinstance(vocabulary, list):  # Unigram: [token, score] by id
            vocabulary = {token: n for n, (token, _) in enumerate(vocabulary)}
        tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
        return tokens | {int(token["id"]): str(token["content"]) for token in added}
    except (KeyError, TypeError, ValueError):
        raise BadCheckpoint(f"{folder.name}: the vocabulary of tokenizer.json cannot be read") from None
