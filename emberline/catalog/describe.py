"""Cards for models nobody has written one for: made from what the weights say."""

import re
from datetime import UTC, datetime
from pathlib import Path

from emberline.catalog.card import ModelCard, PathSource, Source
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.checkpoint import open_checkpoint
from emberline.weights.errors import BadCheckpoint


def slug(name: str) -> str:
    """The name in the letters an id may have."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model"


def describe_path(path: Path) -> ModelCard:
    """The card of a file or folder of the user's own; BadInput where it is not a model."""
    if not (path.is_file() or path.is_dir()):
        raise ModelNotFound(f"there is no file or folder {path}")
    name = slug(path.stem if path.is_file() else path.name)
    return describe(path, f"@local/models/{name}", (name,), PathSource(str(path)))


def describe(path: Path, model_id: str, aliases: tuple[str, ...], source: Source) -> ModelCard:
    try:
        checkpoint = open_checkpoint(path)
    except BadCheckpoint as error:
        raise BadInput(f"{path} is not a model that can be served: {error}") from None
    config = checkpoint.config
    weights = [checkpoint.weight(name) for name in checkpoint.names]
    card = ModelCard(
        id=model_id,
        aliases=aliases,
        description=f"A {config.architecture} model of {config.n_layers} layers, width {config.hidden_size}.",
        author=model_id.split("/")[1],
        context_window=config.context_len,
        source=source,
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        architecture=config.architecture,
        weight_bytes=sum(weight.raw.nbytes for weight in weights),
        fingerprint=checkpoint.fingerprint,
    )
    checkpoint.close()
    return card
