"""Fields of a JSON body that its API does not know: they are ignored, and the client is told in a response header.

A field that other servers know and that would change the answer is refused by name instead
(`api/common/unsupported_fields.py`).
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import msgspec

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

log = logging.getLogger(__name__)


@cache
def declared_fields(struct: type[Any]) -> dict[str, bool]:
    """Names of a struct's fields in JSON; True for those that are Raw."""
    return {field.encode_name: field.type is msgspec.Raw for field in msgspec.structs.fields(struct)}


def unknown_fields(names: Iterable[str], kind: Any) -> tuple[str, ...]:
    """The names in a body that are neither fields of the struct `kind` nor without an effect.

    A `kind` that is no struct takes every name."""
    known = _known(kind)
    if known is None or known.issuperset(names):
        return ()
    return tuple([name for name in names if name not in known])


@cache
def _known(kind: Any) -> frozenset[str] | None:
    if not isinstance(kind, type) or not issubclass(kind, msgspec.Struct):
        return None
    return NO_EFFECT.union(declared_fields(kind))


def warning(unknown: Sequence[str]) -> bytes:
    """Value of the response header that names the ignored fields."""
    more = len(unknown) - _MAX_NAMES
    names = ", ".join(f"`{_printable(name)}`" for name in unknown[:_MAX_NAMES])
    return f"ignored unknown fields: {names}{f' and {more} more' if more > 0 else ''}".encode("ascii")


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
        if not unknown:
            return
        left_out = 0
        if (now_s := self._clock()) >= self._end_s:
            left_out = max(0, self._n_lines - LOG_LINES)
            self._end_s, self._n_lines = now_s + LOG_INTERVAL_S, 0
        self._n_lines += 1
        if self._n_lines > LOG_LINES:
            return
        extra = {"lines_left_out": left_out} if left_out else None
        log.warning("a request to %s had %s", path, warning(unknown).decode(), extra=extra)


unknown_field_log = UnknownFieldLog()  # of this process
