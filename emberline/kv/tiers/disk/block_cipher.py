"""Encryption at rest of stored blocks: AES-256 in counter mode, by the OpenSSL that Python links with.

The standard library has no cipher of its own, and the construction for small secrets (keyed BLAKE2b as a key stream)
makes some megabytes per second. The keyed tag authenticates nonce and ciphertext, so no other mode is needed.
"""

import ctypes
from hashlib import blake2b
from typing import Any

from emberline.kv.tiers.block_tag import byte_span, libcrypto

KEY_BYTES = 32
_MAX_PART = 1 << 30  # bytes of one call: it counts them in a C int


def derived_key(key: bytes) -> bytes:
    """The encryption key of those who have this tagging key."""
    return blake2b(key=key, person=b"emberline.kvenc", digest_size=KEY_BYTES).digest()


class CipherUnavailable(RuntimeError):
    """OpenSSL's library cannot be called; the message says what to install."""


class BlockCipher:
    """Encrypts and decrypts, which are the same. From any thread; the interpreter's lock is released meanwhile."""

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES
        library = libcrypto()
        if library is None or not hasattr(library, "EVP_aes_256_ctr"):
            raise CipherUnavailable(
                "encrypting the KV cache on disk needs OpenSSL 3's libcrypto as a shared library: "
                "install it (Debian: libssl3) or set [kv] disk_encryption = false"
            )
        self._key = key
        self._library: Any = library
        pointer = ctypes.c_void_p
        library.EVP_aes_256_ctr.restype = library.EVP_CIPHER_CTX_new.restype = pointer
        library.EVP_CIPHER_CTX_free.restype, library.EVP_CIPHER_CTX_free.argtypes = None, [pointer]
        texts = [ctypes.c_char_p, ctypes.c_char_p]
        library.EVP_EncryptInit_ex.argtypes = [pointer, pointer, pointer, *texts]
        library.EVP_EncryptUpdate.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int]
        self._cipher = library.EVP_aes_256_ctr()

    def crypt(self, nonce: bytes, source: memoryview, target: memoryview) -> None:
        """Encrypt or decrypt into a target of the same length, which may be the same bytes. Each nonce of 16 bytes is
        used once."""
        assert len(nonce) == 16
        assert source.nbytes == target.nbytes
        library = self._library
        from_address, n_bytes, from_owner = byte_span(source)
        to_address, _, to_owner = byte_span(target)
        context = library.EVP_CIPHER_CTX_new()
        written = ctypes.c_int()
        try:
            done = library.EVP_EncryptInit_ex(context, self._cipher, None, self._key, nonce) == 1
            for at in range(0, n_bytes, _MAX_PART):
                size = min(_MAX_PART, n_bytes - at)
                where = to_address + at, ctypes.byref(written), from_address + at, size
                done = done and library.EVP_EncryptUpdate(context, *where) == 1
        finally:
            library.EVP_CIPHER_CTX_free(context)
        del from_owner, to_owner
        if not done:
            raise RuntimeError("OpenSSL cannot encrypt")
