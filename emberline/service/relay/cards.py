"""A card for a model of which we know only what its servers say."""

from collections.abc import Sequence
from datetime import UTC, datetime

from emberline.balancer.http.upstream import DEFAULT_CONTEXT, Upstream
from emberline.catalog.card import ModelCard, PathSource


def card_of(model: str, servers: Sequence[Upstream]) -> ModelCard:
    kinds = sorted({server.server.kind for server in servers})
    lengths = [server.info.context_len for server in servers if server.info is not None]
    return ModelCard(
        id=model,
        aliases=(),
        description=f"Served elsewhere ({', '.join(kinds)}): {', '.join(server.name for server in servers)}.",
        author=model.split("/")[0].lstrip("@") if "/" in model else kinds[0],
        context_window=min(lengths, default=DEFAULT_CONTEXT),
        source=PathSource(""),
        created_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3],
        fingerprint=f"{kinds[0]}:{model}",
    )
