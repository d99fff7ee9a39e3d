"""The keyed tag of a stored KV block: who lacks the key can neither forge a block nor pass one off as another.

A tag is [algorithm, 1 byte][nonce, 16 bytes][MAC, 16 bytes]. Its MAC key is used once: it is derived from the tagging
key, the random nonce and the block's address, so that the MAC binds the bytes to the address. The MAC is AES-GMAC of
OpenSSL, which Python links with: 3 to 5 times as fast as SHA-256, where a tag is computed over every byte that is
fetched. HMAC-SHA256 takes its place where OpenSSL 3 cannot be called; it is verified everywhere.
"""

import ctypes
import ctypes.util
import hmac
import importlib
import secrets
from collections.abc import Callable
from functools import cache
from typing import Any

TAG_BYTES = 33
_NONCE_BYTES = _MAC_BYTES = 16
_SHA256, _GMAC = 1, 2  # stored: they must not change

Buffer = bytes | bytearray | memoryview


class BlockTagger:
    """Tags blocks and verifies them, from any thread. All workers that share a tier have the same key."""

    def __init__(self, key: bytes, use_openssl: bool = True) -> None:
        """`use_openssl`: for GMAC, if OpenSSL can be called; otherwise blocks are tagged by SHA-256."""
        assert len(key) >= 16, "a tagging key is a derived key"
        self._key = key
        self._gmac = openssl_gmac() if use_openssl else None
        self._algorithm = _SHA256 if self._gmac is None else _GMAC

    def tag(self, address: bytes, data: Buffer) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        head = bytes((self._algorithm,)) + nonce
        return head + self._mac(head, address, data)

    def verify(self, address: bytes, data: Buffer, tag: Buffer) -> bool:
        """True if this is the block that was stored under the address. False also for a MAC that cannot be computed."""
        head, mac = bytes(tag[: 1 + _NONCE_BYTES]), bytes(tag[1 + _NONCE_BYTES :])
        if len(tag) != TAG_BYTES or head[0] not in (_SHA256, _GMAC) or (head[0] == _GMAC and self._gmac is None):
            return False
        return hmac.compare_digest(self._mac(head, address, data), mac)

    def _mac(self, head: bytes, address: bytes, data: Buffer) -> bytes:
        once = hmac.digest(self._key, b"emberline.kv.block\0" + head + address, "sha256")
        if head[0] == _GMAC and self._gmac is not None:
            return self._gmac(once[:16], data)
        return hmac.digest(once, data, "sha256")[:_MAC_BYTES]


class _Parameter(ctypes.Structure):
    """OpenSSL's OSSL_PARAM."""

    _fields_ = (
        ("key", ctypes.c_char_p),
        ("data_type", ctypes.c_uint),
        ("data", ctypes.c_char_p),
        ("data_size", ctypes.c_size_t),
        ("return_size", ctypes.c_size_t),
    )


_UTF8, _OCTETS = 4, 5  # OSSL_PARAM_UTF8_STRING, OSSL_PARAM_OCTET_STRING


@cache
def openssl_gmac() -> Callable[[bytes, Buffer], bytes] | None:
    """AES-128-GMAC under a key that is used once, with a nonce of zeros. Returns None if OpenSSL 3 cannot be called."""
    library = libcrypto()
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.EVP_MAC_fetch.restype, library.EVP_MAC_fetch.argtypes = pointer, [pointer, ctypes.c_char_p, ctypes.c_char_p]
    library.EVP_MAC_CTX_new.restype, library.EVP_MAC_CTX_new.argtypes = pointer, [pointer]
    library.EVP_MAC_CTX_free.restype, library.EVP_MAC_CTX_free.argtypes = None, [pointer]
    library.EVP_MAC_init.argtypes = [pointer, ctypes.c_char_p, size, pointer]
    library.EVP_MAC_update.argtypes = [pointer, pointer, size]
    library.EVP_MAC_final.argtypes = [pointer, ctypes.c_char_p, pointer, size]
    algorithm = library.EVP_MAC_fetch(None, b"GMAC", None)
    if not algorithm:
        return None
    parameters = (_Parameter * 3)(
        _Parameter(b"cipher", _UTF8, b"AES-128-GCM", 11, 0), _Parameter(b"iv", _OCTETS, bytes(12), 12, 0), _Parameter()
    )

    def compute(key: bytes, data: Buffer) -> bytes:
        address, n_bytes, owner = byte_span(data)
        context = library.EVP_MAC_CTX_new(algorithm)
        mac = ctypes.create_string_buffer(_MAC_BYTES)
        written = size()
        try:
            done = (
                library.EVP_MAC_init(context, key, len(key), parameters) == 1
                and library.EVP_MAC_update(context, address, n_bytes) == 1
                and library.EVP_MAC_final(context, mac, ctypes.byref(written), _MAC_BYTES) == 1
            )
        finally:
            library.EVP_MAC_CTX_free(context)
        del owner
        if not done or written.value != _MAC_BYTES:
            raise RuntimeError("OpenSSL computes no GMAC")
        return mac.raw

    try:
        compute(bytes(16), b"probe")
    except RuntimeError:
        return None
    return compute


def libcrypto() -> Any:
    """The libcrypto that this Python uses: looked up through its own extension module, else on the system."""
    own = getattr(importlib.import_module("_hashlib"), "__file__", None)
    for path in (own, ctypes.util.find_library("crypto")):
        try:
            library = ctypes.CDLL(path) if path else None
        except OSError:
            continue
        if library is not None and hasattr(library, "EVP_MAC_fetch"):
            return library
    return None


def byte_span(data: Buffer) -> tuple[int, int, object]:
    """Address and length of the bytes, without copying writable ones; and what must live while they are used."""
    view = memoryview(data).cast("B")
    if not len(view):
        return 0, 0, view
    if view.readonly:
        copy = ctypes.create_string_buffer(bytes(view), len(view))
        return ctypes.addressof(copy), len(view), copy
    exported = (ctypes.c_char * len(view)).from_buffer(view)
    return ctypes.addressof(exported), len(view), exported
