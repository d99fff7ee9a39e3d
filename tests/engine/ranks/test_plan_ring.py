"""The ring of shared memory that carries plans to followers: order, long messages, slow readers."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberline.engine.ranks.plan_ring import MAX_READERS, RingClosed, RingReader, RingWriter, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="futexes are Linux's")


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(1, 3))
def test_every_reader_gets_every_message_in_order(sizes: list[int], n_readers: int) -> None:
    writer = RingWriter(n_readers, n_bytes=4096)
    readers = [RingReader(os.dup(writer.descriptor), number) for number in range(n_readers)]
    random.seed(len(sizes))
    for size in sizes:
        message = random.randbytes(size)
        with ThreadPoolExecutor(n_readers) as pool:
            reading = [pool.submit(reader.read, 60.0) for reader in readers]
            writer.write(message, timeout_s=60.0)
        assert [each.result() for each in reading] == [message] * n_readers
    os.close(writer.descriptor)


def test_messages_wait_for_a_reader() -> None:
    writer = RingWriter(1)
    reader = RingReader(writer.descriptor, 0)
    messages = [bytes([n]) * n for n in range(100)]
    for message in messages:
        writer.write(message)
    assert [reader.read(0.0) for _ in messages] == messages
    assert reader.read(0.0) is None


def test_a_reader_that_does_not_read_is_known_and_is_not_overwritten() -> None:
    writer = RingWriter(2, n_bytes=1024)
    quick, slow = RingReader(writer.descriptor, 0), RingReader(writer.descriptor, 1)
    n = 1024 // (64 + 8)
    for _ in range(n):
        writer.write(bytes(64))
        quick.read(0.0)
    with pytest.raises(RingClosed, match="behind"):
        writer.write(bytes(64), timeout_s=0.01)
    quick.read(0.0)
    assert writer.n_unread() == [0, n]
    assert all(slow.read(0.0) == bytes(64) for _ in range(n))


def test_the_number_of_readers_is_limited() -> None:
    with pytest.raises(ValueError, match=str(MAX_READERS)):
        RingWriter(MAX_READERS + 1)
