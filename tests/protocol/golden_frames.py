"""Frames of each protocol version as they were when it was released: `python -m tests.protocol.golden_frames` writes
those of this version, once, before it is changed for the next."""

import json
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import inspect

from emberline.kv.transfer import messages
from emberline.protocol import frames, member

FOLDER = Path(__file__).with_name("golden")
UNIONS = {
    "to engine": (frames.ToEngine, frames.to_engine_decoder),
    "from engine": (frames.FromEngine, frames.from_engine_decoder),
    "to receiver": (messages.ToReceiver, messages.to_receiver),
    "to sender": (messages.ToSender, messages.to_sender),
}
SIGNED = (member.Announcement, member.Standing)  # as JSON


def example(kind: inspect.Type) -> Any:
    """A value of the type with every field set."""
    if isinstance(kind, inspect.Metadata):
        return example(kind.type)
    if isinstance(kind, inspect.StructType | inspect.DataclassType):
        return kind.cls(**{field.name: example(field.type) for field in kind.fields})
    if isinstance(kind, inspect.UnionType):
        return example(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
    if isinstance(kind, inspect.LiteralType):
        return kind.values[-1]
    if isinstance(kind, inspect.EnumType):
        return list(kind.cls)[-1]
    if isinstance(kind, inspect.DictType):
        return {example(kind.key_type): example(kind.value_type)}
    if isinstance(kind, inspect.TupleType):
        return tuple(example(each) for each in kind.item_types)
    if isinstance(kind, inspect.VarTupleType):
        return (example(kind.item_type),)
    if isinstance(kind, inspect.ListType):
        return [example(kind.item_type)]
    if isinstance(kind, inspect.StrType):
        return {None: "text", r"^[0-9a-f]{32}\Z": "0f" * 16, r"^tcp:.{1,255}:[0-9]{1,5}\Z": "tcp:10.0.0.1:7070"}.get(
            kind.pattern, "text"
        )
    simple = {
        inspect.BoolType: True,
        inspect.IntType: 7,
        inspect.FloatType: 0.5,
        inspect.BytesType: b"\1\2\3\4",
        inspect.AnyType: 7,
    }
    return simple[type(kind)]


def plain(value: Any) -> Any:
    """As JSON, bytes in base64."""
    return json.loads(msgspec.json.encode(value, enc_hook=lambda each: each.value if isinstance(each, Enum) else each))


def frame_of(kind: type) -> bytes:
    return msgspec.msgpack.encode(example(inspect.type_info(kind)))


def schemas() -> dict[str, Any]:
    kinds = [each for union, _ in UNIONS.values() for each in get_args(union)]
    return msgspec.json.schema_components([*kinds, *SIGNED])[1]


def record() -> dict[str, Any]:
    found: dict[str, Any] = {
        union: {
            kind.__name__: {"frame": frame_of(kind).hex(), "value": plain(example(inspect.type_info(kind)))}
            for kind in get_args(kinds)
        }
        for union, (kinds, _) in UNIONS.items()
    }
    found["signed"] = {kind.__name__: plain(example(inspect.type_info(kind))) for kind in SIGNED}
    found["schemas"] = schemas()
    return found


if __name__ == "__main__":
    with open(FOLDER / f"v{frames.VERSION}.json", "x", encoding="utf-8") as file:
        json.dump(record(), file, indent=1, sort_keys=True)
        file.write("\n")
