"""Servers' KV events in our own keys, whatever their form."""

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberline.protocol import token_ids as tokens
from emberline.upstream.servers.kv_events import BadKVEvents, KVEventDecoder, chain_keys, key_root

ROOT = key_root("vllm", "m")
IDS = list(range(100, 260))


def keys(ids: list[int]) -> bytes:
    return chain_keys(ROOT, tokens.pack(ids))


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(hashes: list[Any], parent: Any, ids: list[int], size: int, form: str = "map", **more: Any) -> Any:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids}
    event |= {"block_size": size, **more}
    return event if form == "map" else [*event.values()]


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("size", [1, 4, 16, 32, 128])
def test_blocks_of_any_size_become_our_chain(form: str, size: int) -> None:
    feed, n = KVEventDecoder(ROOT), len(IDS) // size
    half = n // 2
    first = feed.decode(batch(stored(list(range(half)), None, IDS[: half * size], size, form)))
    rest = feed.decode(
        batch(stored(list(range(half, n)), half - 1 if half else None, IDS[half * size : n * size], size, form))
    )
    assert first.stored + rest.stored == keys(IDS[: n * size])
    assert first.removed == b""


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_removed_block_takes_its_keys_with_it(form: str) -> None:
    feed = KVEventDecoder(ROOT)
    feed.decode(batch(stored([b"a", b"b"], None, IDS[:32], 16, form)))
    gone: Any = {"type": "BlockRemoved", "block_hashes": [b"b"]} if form == "map" else ["BlockRemoved", [b"b"]]
    assert feed.decode(batch(gone)).removed == keys(IDS[:32])[16:]
    assert feed.decode(batch(gone)).removed == b""


def test_two_tenants_blocks_of_the_same_tokens_are_one_key_until_both_are_gone() -> None:
    feed = KVEventDecoder(ROOT)
    assert feed.decode(batch(stored([1], None, IDS[:16], 16))).stored == keys(IDS[:16])
    assert feed.decode(batch(stored([2], None, IDS[:16], 16))).stored == b""
    assert feed.decode(batch({"type": "BlockRemoved", "block_hashes": [1]})).removed == b""
    assert feed.decode(batch({"type": "BlockRemoved", "block_hashes": [2]})).removed == keys(IDS[:16])


def test_what_cannot_be_placed_is_left_out() -> None:
    feed = KVEventDecoder(ROOT)
    late = feed.decode(batch(stored([9], 8, IDS[:16], 16)))  # its parent was stored before we listened
    elsewhere = feed.decode(batch(stored([1], None, IDS[:16], 16, medium="CPU")))
    lora = feed.decode(batch(stored([2], None, IDS[:16], 16, lora_id=3)))
    assert late.stored == elsewhere.stored == lora.stored == b""
    assert len(feed) == 0


def test_all_cleared_means_all_that_was_known() -> None:
    feed = KVEventDecoder(ROOT)
    feed.decode(batch(stored([1], None, IDS[:16], 16)))
    events = feed.decode(batch({"type": "AllBlocksCleared"}, stored([2], None, IDS[:16], 16)))
    assert events.whole
    assert events.stored == keys(IDS[:16])


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0, 3]),
        batch(3),
        batch([]),
        batch({"type": "BlockStored"}),
        batch(stored([1], None, [-1] * 16, 16)),
        batch(stored([1], None, ["x"] * 16, 16)),
        batch(stored([1.5], None, IDS[:16], 16)),
        batch(stored([1], None, IDS[:16], 0)),
        batch({"type": "BlockRemoved", "block_hashes": 3}),
    ],
)
def test_garbage_is_an_error_of_its_own(payload: bytes) -> None:
    with pytest.raises(BadKVEvents):
        KVEventDecoder(ROOT).decode(payload)


@given(st.binary(max_size=200))
def test_no_bytes_break_the_feed(payload: bytes) -> None:
    feed = KVEventDecoder(ROOT)
    with contextlib.suppress(BadKVEvents):
        feed.decode(payload)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_events_add_up_to_the_server_s_blocks(steps: list[tuple[bool, int]]) -> None:
    """Blocks of a chain are stored and removed in any order; the reported keys are those that the server has."""
    feed, held, told = KVEventDecoder(ROOT), set[int](), set[bytes]()
    for is_stored, number in steps:
        if is_stored and (number == 0 or number - 1 in held):
            ids = IDS[number * 16 : number * 16 + 16]
            events = feed.decode(batch(stored([number], number - 1 if number else None, ids, 16)))
            held.add(number)
        elif not is_stored:
            events = feed.decode(batch({"type": "BlockRemoved", "block_hashes": [number]}))
            held.discard(number)
        else:
            continue
        told |= {events.stored[i : i + 16] for i in range(0, len(events.stored), 16)}
        told -= {events.removed[i : i + 16] for i in range(0, len(events.removed), 16)}
    whole = keys(IDS)
    assert told == {whole[number * 16 : number * 16 + 16] for number in held}
