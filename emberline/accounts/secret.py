"""The root secret of an installation, from which a key is derived for each purpose."""

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from emberline.protocol.errors import BadInput

ENVIRONMENT = "EMBERLINE_SECRET"
FILE = "secret"
MIN_LENGTH = 32  # characters, as of `openssl rand -hex 16`


class Secret:
    """Owns the root secret and only returns keys derived from it."""

    def __init__(self, root: str) -> None:
        if len(root) < MIN_LENGTH:
            raise BadInput(f"the root secret has {len(root)} characters, at least {MIN_LENGTH} are needed")
        self._key = blake2b(root.encode(), person=b"emberline.root").digest()

    @classmethod
    def open(cls, data_dir: Path) -> "Secret":
        """The secret from the environment, or from the data folder's file, which is created if missing."""
        if root := os.environ.get(ENVIRONMENT):
            return cls(root)
        path = data_dir / FILE
        try:
            if not path.exists():
                _create(path)
            return cls(_read(path))
        except OSError as error:
            raise BadInput(f"cannot use the root secret {path}: {error.strerror}") from error

    @classmethod
    def existing(cls, data_dir: Path) -> "Secret | None":
        """The secret as `open` finds it; None where there is none yet, or this user may not read it."""
        try:
            return cls.open(data_dir) if os.environ.get(ENVIRONMENT) or (data_dir / FILE).exists() else None
        except (BadInput, OSError):
            return None

    def derive(self, purpose: str, *context: str, size: int = 16) -> bytes:
        """A key for one purpose and context (such as an account); inputs are length-prefixed, so none collide."""
        keyed = blake2b(key=self._key, digest_size=size)
        for part in (purpose, *context):
            raw = part.encode()
            keyed.update(len(raw).to_bytes(4, "little"))
            keyed.update(raw)
        return keyed.digest()


def _create(path: Path) -> None:
    """Written under another name first, so that a reader never sees a partial secret."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{FILE}.{secrets.token_hex(8)}")
    handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        os.link(fresh, path)
    except FileExistsError:
        pass  # another process was first, and its secret is used
    finally:
        fresh.unlink()


def _read(path: Path) -> str:
    with path.open() as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            raise BadInput(f"the root secret {path} is open to others (mode {mode:o}): run chmod 600 {path}")
        return file.read().strip()
