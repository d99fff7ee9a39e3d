"""Fields of a body without an effect: a response header names them. They are those that its API does not know, at any
depth, and those that ask a model for reasoning which does not reason.

A field that other servers know and that would change the answer is refused by name instead
(`api/common/unsupported_fields.py`).
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw, inspect

HEADER = "x-emberline-warning"
LOG_INTERVAL_S, LOG_LINES = 60.0, 10
_MAX_NAMES = 8  # in a header
_MAX_NAME_CHARS = 64

# Known fields without which the answer is the same; docs/api.md says why, of each.
NO_EFFECT = frozenset(
    {
        # bookkeeping
        *("metadata", "store", "safety_identifier", "request_id", "rid", "trace", "usage", "user", "session_id"),
        *("custom_labels", "external_reference"),
        # hints about speed and style, and about where something is kept
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_max_len", "prediction", "cache_control"),
        *("cache_prompt", "id_slot", "keep_alive", "guided_decoding_backend", "verbosity", "context_management"),
        *("n_cache_reuse", "backend_sampling", "speculative.n_max", "speculative.n_min", "speculative.p_min"),
        *("sse_ping_interval", "fail_fast", "queue_threshold", "num_draft_tokens", "tool_stream"),
        # of a feature that has to be switched on by another field
        *("model", "parallel_tool_calls", "max_tool_calls", "stream_options"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent"),
        *("mirostat_tau", "mirostat_eta", "mirostat_lr", "repeat_last_n", "xtc_threshold"),
        *("adaptive_decay", "smoothing_curve", "early_stopping", "truncation_side", "spaces_between_special_tokens"),
        *("pad_token_id", "routed_experts_start_len", "use_audio_in_video", "n_discard"),
    }
)

# Names of nested fields without an effect.
NO_EFFECT_NESTED = frozenset(
    {
        # what replies have in messages, calls and items, which clients send back
        *("type", "id", "index", "status", "name", "title", "annotations", "refusal", "audio", "phase", "logprobs"),
        *("citations", "caller", "created_at", "created_by", "timestamp", "provider_specific_fields", "format"),
        *("reasoning_content", "reasoning", "reasoning_details", "thinking", "signature", "encrypted_content"),
        # hints: where text is cached, and how a provider sends a tool's arguments
        *("cache_control", "scope", "eager_input_streaming", "defer_loading", "allowed_callers"),
        # how Ollama loads a model: here it runs on the devices that the server was started with
        *("num_gpu", "main_gpu", "num_batch", "num_thread", "num_keep", "use_mmap", "use_mlock", "low_vram", "f16_kv"),
        *("numa", "mirostat_tau", "mirostat_eta"),
    }
)
# Fields by which the APIs ask for reasoning, or limit it.
REASONING_FIELDS = (
    *("reasoning_effort", "thinking_token_budget", "thinking", "chat_template_kwargs"),
    *("reasoning.effort", "reasoning.max_tokens", "reasoning.enabled", "output_config.effort"),
)
UNSUPPORTED = "x-unsupported"  # in the schema of a field that is refused: it is left out of the document
READ_AS = "read_as"  # key of a Meta's `extra`: the type that an endpoint converts a field's plain JSON to

log = logging.getLogger(__name__)


@cache
def declared_fields(struct: type[Any]) -> dict[str, bool]:
    """Names of a struct's fields in JSON; True for those that are Raw."""
    return {field.encode_name: field.type is msgspec.Raw for field in msgspec.structs.fields(struct)}


def unknown_fields(fields: Mapping[str, Any], kind: Any) -> tuple[str, ...]:
    """Names of the fields of a body that are neither fields of the struct `kind` nor without an effect.

    `fields` are the body's, decoded or Raw. A nested field has its path as name, without numbers in lists:
    `messages[].contnt`. A nested field that is null asks for nothing. A `kind` that is no struct takes every name."""
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return ()
    known = _known(kind)
    found = {} if known.names.issuperset(fields) else dict.fromkeys(name for name in fields if name not in known.names)
    for name, shape in known.nested.items():
        value = fields.get(name)
        if isinstance(value, Raw):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError):  # a number out of range, where no struct reads it
                continue
        if isinstance(value, dict | list):
            _add_nested(value, shape, name, found)
    return tuple(found)


@cache
def has_nested_fields(kind: Any) -> bool:
    """True if `unknown_fields` looks into the fields of the struct `kind`, none of which is left Raw."""
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return is_struct and bool(_known(kind).nested) and not _known(kind).has_raw


@dataclass(slots=True)
class _Fields:
    """Names of an object's fields, and the shapes of those that hold objects themselves."""

    names: frozenset[str]
    nested: dict[str, "_Shape"] = field(default_factory=dict)
    has_raw: bool = False  # a field that is left undecoded


@dataclass(slots=True)
class _Shape:
    """The objects that a value may be, by the value of `tag_field`, or the shape of its elements if it is a list."""

    objects: dict[Any, _Fields] = field(default_factory=dict)  # the first is also for objects without a tag
    tag_field: str = ""
    elements: "_Shape | None" = None


@cache
def _known(kind: type[msgspec.Struct]) -> _Fields:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    known = _fields_of(found, {})
    known.names |= NO_EFFECT
    known.nested.pop("metadata", None)  # holds what the client likes
    known.has_raw = any(_is_raw(each) for one in found.fields for each in _alternatives(one.type))
    return known


def _fields_of(struct: inspect.StructType, made: dict[type, _Fields]) -> _Fields:
    """The fields of a struct; `made` has those of structs that contain it."""
    if (found := made.get(struct.cls)) is None:
        found = made[struct.cls] = _Fields(frozenset(one.encode_name for one in struct.fields))
        for one in struct.fields:
            if (shape := _shape_of(one.type, made)) is not None:
                found.nested[one.encode_name] = shape
    return found


def _shape_of(kind: inspect.Type, made: dict[type, _Fields]) -> _Shape | None:
    """Returns None if no value of the type holds an object whose fields are known."""
    shape = _Shape()
    for each in _alternatives(kind):
        if isinstance(each, inspect.StructType):
            fields = _fields_of(each, made)
            shape.tag_field = shape.tag_field or each.tag_field or ""
            other = shape.objects.get(each.tag, _Fields(NO_EFFECT_NESTED))
            nested = {**other.nested, **fields.nested} if other.nested else fields.nested
            shape.objects[each.tag] = _Fields(fields.names | other.names, nested)
        elif isinstance(each, inspect.ListType):
            shape.elements = _shape_of(each.item_type, made)
        elif isinstance(each, inspect.DictType | inspect.AnyType | inspect.RawType):
            return None  # any object
    return shape if shape.objects or shape.elements else None


def _is_raw(kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.RawType) or (isinstance(kind, inspect.ListType) and _is_raw(kind.item_type))


def _alternatives(kind: inspect.Type) -> Iterator[inspect.Type]:
    """The types of a union, without their annotations, or the type itself."""
    if isinstance(kind, inspect.Metadata):
        read_as = (kind.extra or {}).get(READ_AS)
        yield from _alternatives(kind.type if read_as is None else inspect.type_info(read_as))
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _alternatives(each)
    else:
        yield kind


def _add_nested(value: Any, shape: _Shape, path: str, found: dict[str, None]) -> None:
    """Add the paths of the unknown fields inside a value, which its struct's decoder has accepted."""
    values = [value]
    if isinstance(value, list):
        if shape.elements is None:
            return
        values, shape, path = value, shape.elements, f"{path}[]"
    for one in values:
        if isinstance(one, list):
            _add_nested(one, shape, path, found)
        elif isinstance(one, dict) and shape.objects:
            tag = one.get(shape.tag_field)
            known = shape.objects.get(tag) if isinstance(tag, str) else next(iter(shape.objects.values()))
            if known is None:  # of a type that only other servers know
                continue
            if not known.names.issuperset(one):
                for name, given in one.items():
                    if name not in known.names and given is not None:
                        found[f"{path}.{name}"] = None
            for name, inner in known.nested.items():
                if isinstance(given := one.get(name), dict | list):
                    _add_nested(given, inner, f"{path}.{name}", found)


def warning(unknown: Sequence[str]) -> bytes:
    """Value of the response header that names the ignored fields."""
    more = len(unknown) - _MAX_NAMES
    names = ", ".join(f"`{_printable(name)}`" for name in unknown[:_MAX_NAMES])
    return f"ignored unknown fields: {names}{f' and {more} more' if more > 0 else ''}".encode("ascii")


def reasoning_warning(fields: Mapping[str, Raw], model: str) -> bytes:
    """Value of the response header for a request that asks for reasoning, of a model that does not reason."""
    names = ", ".join(f"`{path}`" for path in REASONING_FIELDS if _is_given(fields, path))
    return f"no effect of {names}: {_printable(model)} does not reason".encode("ascii")


def _is_given(fields: Mapping[str, Raw], path: str) -> bool:
    name, _, inner = path.partition(".")
    value = msgspec.json.decode(fields.get(name, b"null"))
    return (value.get(inner) if inner and isinstance(value, dict) else value) is not None


def _printable(name: str) -> str:
    """A client's name, as ASCII text that cannot end a header or a line of the log."""
    shown = name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "..."
    return ascii(shown)[1:-1].replace("`", "'")


class UnknownFieldLog:
    """Log lines about ignored fields: at most LOG_LINES in LOG_INTERVAL_S, then the number of those left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end_s = 0.0  # of the interval
        self._n_lines = 0  # of this interval, also those left out

    def add(self, path: str, unknown: Sequence[str]) -> None:
        """Log the unknown fields of a request to the route `path`, if it has any."""
        if unknown:
            self.add_warning(path, warning(unknown))

    def add_warning(self, path: str, value: bytes) -> None:
        """Log a value of the response header."""
        left_out = 0
        if (now_s := self._clock()) >= self._end_s:
            left_out = max(0, self._n_lines - LOG_LINES)
            self._end_s, self._n_lines = now_s + LOG_INTERVAL_S, 0
        self._n_lines += 1
        if self._n_lines > LOG_LINES:
            return
        extra = {"lines_left_out": left_out} if left_out else None
        log.warning("a request to %s had %s", path, value.decode(), extra=extra)


unknown_field_log = UnknownFieldLog()  # of this process
