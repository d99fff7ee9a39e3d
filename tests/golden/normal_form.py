"""The one normaliser of golden files: replaces what differs between two runs, and nothing else.

A placeholder keeps identity: the same id in a file gets the same placeholder, wherever it occurs.
"""

import re
from typing import Any

from emberline import __version__

Json = Any

# Values that are replaced because of their name, wherever it occurs as a key.
TIMES = frozenset({"time", "created", "modified_at", "webhook-timestamp"})
TIME_ENDINGS = ("_at", "_us")
DAYS = frozenset({"since", "until"})  # of a report up to today
DURATIONS = frozenset(
    {"ms", "ttft_ms", "duration_ms", "waited_ms", "retry-after-ms"}
    | {"device_seconds"}
    | {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
    | {"x-ratelimit-reset-requests", "x-ratelimit-reset-tokens"}
)
ESTIMATES = frozenset({"estimated_wait_s"})
DIGESTS = frozenset({"head", "webhook-signature", "hint"})
NAMED_IDS = frozenset({"session"})  # its digest, which is one of a random id where the client names none
MARKED_LISTS = frozenset({"context"})  # token ids after a number that stands for the model's fingerprint
# Ids are random: UUIDs with or without hyphens; those of keys, calls, files and other objects; budget leases;
# and, alone in a value, digests of the admin key, of the cluster and of a model's fingerprint, which a model store has
# from the release that fetched the model.
ID = re.compile(
    r"(?<![0-9A-Za-z])(?:[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}"
    r"|(?<=key_)[0-9a-f]{16}|(?<=[a-z][_-])[0-9a-f]{24,40}|[0-9a-f]{16}(?=\.\d+$))(?![0-9A-Za-z])"
    r"|^(?:[0-9a-f]{12}|[0-9a-f]{16}|[0-9a-f]{64})$"
)
PATTERNS = (
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:<port>"),
    (re.compile(re.escape(__version__)), "<version>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)?"), "<time>"),
    (re.compile(r"(?<!\w)1[789]\d{14}(?!\w)"), "<time>"),
    (re.compile(r"(?<=,)\d+\.\d{2,3}(?=\r\n)"), "<duration>"),  # device seconds, the last column of a report
    (re.compile(r"retry in \d+ s"), "retry in <duration>"),
    (re.compile(r"ember_[0-9A-Za-z_-]{40,}"), "<key>"),
    (re.compile(r"whsec_[0-9A-Za-z+/=]{40,}"), "<secret>"),
)
LONG_WAIT_S = 30  # a Retry-After beyond it counts down to a moment


class Normaliser:
    """Replaces the volatile values of one golden file."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}

    def __call__(self, value: Json, name: str = "") -> Json:
        if isinstance(value, dict):
            return {self._text(key): self(item, key) for key, item in value.items()}
        if name in MARKED_LISTS and isinstance(value, list) and value:
            return [self._placeholder(str(value[0])), *value[1:]]
        if isinstance(value, list | tuple):
            return [self(item, name) for item in value]
        return self._named(value, name)

    def _named(self, value: Json, name: str) -> Json:
        if value and (name in TIMES or name.endswith(TIME_ENDINGS)):
            return "<time>"
        if name in DAYS:
            return "<day>"
        if name in ESTIMATES or (value is not None and name in DURATIONS):
            return "<duration>"
        if name in DIGESTS:
            return "<digest>"
        if name in NAMED_IDS and value:
            return self._placeholder(value)
        if name == "retry-after" and int(value) > LONG_WAIT_S:
            return "<duration>"
        return self._text(value) if isinstance(value, str) else value

    def _text(self, text: str) -> str:
        for pattern, placeholder in PATTERNS:
            text = pattern.sub(placeholder, text)
        return ID.sub(lambda found: self._placeholder(found[0]), text)

    def _placeholder(self, name: str) -> str:
        """The name of an id in this file; a UUID has the same one with and without hyphens."""
        return self._ids.setdefault(name.replace("-", ""), f"<id {len(self._ids) + 1}>")
