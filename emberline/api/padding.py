"""Padding of random length against reading token lengths off the size of encrypted packets."""

import os
from collections.abc import Iterator

_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
_PADS = [_LETTERS[:length] for length in range(1, 33)]


def pads() -> Iterator[bytes]:
    """An endless supply of pads for one stream."""
    while True:
        for byte in os.urandom(128):
            yield _PADS[byte & 31]
