"""Fields that exist in a dialect and are not built yet: refused by name, never ignored."""

from functools import cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.protocol.errors import Unsupported

EMPTY: list[Any] = [None, False, 0, "", [], {}]  # ways to say nothing
UnsupportedField = Annotated[Any, Meta(description="Not supported yet.", extra_json_schema={"enum": EMPTY})]


def unsupported(field: str) -> Unsupported:
    return Unsupported(f"`{field}` is not supported yet", param=field)


def refuse_unsupported(body: msgspec.Struct, where: str = "") -> None:
    """Raise for the first unbuilt field of `body` that says something; `where` is the path to `body`, with its dot."""
    for name in _unbuilt_fields(type(body)):
        if getattr(body, name) not in EMPTY:
            raise unsupported(where + name)


@cache
def _unbuilt_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(kind) if field.type == UnsupportedField)
