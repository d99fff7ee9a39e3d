"""Content keys of blocks of many sequences in one call: `protocol.block_hash` computes those of one chain."""

import ctypes
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

from emberline.kernels.native_library import host_library
from emberline.protocol.block_hash import DIGEST_BYTES, split


@cache
def _native() -> Any:
    """The function of block_keys.h. Returns None if this host could not compile it."""
    if (lib := host_library()) is None:
        return None
    lib.em_block_keys.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_char_p]
    lib.em_block_keys.restype = None
    return lib.em_block_keys


def next_keys(parents: Sequence[bytes], contents: Sequence[bytes | bytearray]) -> list[bytes]:
    """Keys of full blocks without extras, each of another chain, by the key before it and its token ids (u32 LE)."""
    if (native := _native()) is None:
        pairs = zip(parents, contents)
        return [blake2b(content, key=parent, digest_size=DIGEST_BYTES).digest() for parent, content in pairs]
    keys = bytearray(DIGEST_BYTES * len(parents))
    to = (ctypes.c_char * len(keys)).from_buffer(keys)
    native(b"".join(parents), b"".join(contents), len(parents), to)
    return split(bytes(keys))
