"""Two releases speak to each other: frames change only in ways that the older one can read, and that the newer one
can do without."""

import json
from typing import Any, get_args

import msgspec
import pytest

from emberline.protocol import frames
from tests.protocol.golden_frames import FOLDER, SIGNED, UNIONS, plain, schemas

OLD = json.loads((FOLDER / f"v{frames.OLDEST_VERSION}.json").read_text())
OLD_FRAMES = [(union, name) for union in UNIONS for name in OLD[union]]


def test_this_release_speaks_its_own_version_and_the_previous_one() -> None:
    assert frames.OLDEST_VERSION == frames.VERSION - 1


@pytest.mark.parametrize(("union", "name"), OLD_FRAMES)
def test_frames_of_the_previous_version_mean_what_they_did(union: str, name: str) -> None:
    recorded = OLD[union][name]
    message = frames.decode(UNIONS[union][1], bytes.fromhex(recorded["frame"]))
    assert type(message).__name__ == name
    assert_contains(plain(message), recorded["value"])


@pytest.mark.parametrize("kind", SIGNED)
def test_announcements_of_the_previous_version_mean_what_they_did(kind: type) -> None:
    recorded = OLD["signed"][kind.__name__]
    assert_contains(plain(msgspec.convert(recorded, kind)), recorded)


def test_messages_gain_only_fields_with_defaults() -> None:
    now = schemas()
    for name, old in OLD["schemas"].items():
        new = now[name]
        assert new.get("required", []) == old.get("required", []), f"{name}: a field became required, or is no more"
        for field, before in old.get("properties", {}).items():
            assert _without_default(new["properties"][field]) == _without_default(before), f"{name}.{field}"
        items = old.get("prefixItems", [])
        assert new.get("prefixItems", [])[: len(items)] == items, f"{name}: fields of an array stay in place"


def test_only_messages_that_the_previous_version_knows_are_sent_to_it() -> None:
    """Those that are new are sent where both sides speak this version alone: add them here, and check that."""
    new = {
        kind.__name__
        for union, (kinds, _) in UNIONS.items()
        for kind in get_args(kinds)
        if kind.__name__ not in OLD[union]
    }
    assert new == {"SetRole"}


def _without_default(schema: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "default"}


def assert_contains(found: Any, expected: Any) -> None:
    """All that was recorded is there; fields may have been added."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert_contains(found[key], value)
    elif isinstance(expected, list):
        assert len(found) >= len(expected)
        for one, other in zip(found, expected, strict=False):
            assert_contains(one, other)
    else:
        assert found == expected
