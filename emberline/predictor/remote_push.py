"""Pushes over HTTP: an archive of a project from an operator's key, where the operator has allowed them.

An archive is unpacked by name and size alone: regular files within the folder, no links, owners or modes but the bit
that makes a file executable. Pushed models share a quota on disk.
"""

import io
import lzma
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Self

from emberline.catalog.download import folder_bytes
from emberline.catalog.model_store import ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.catalog.store_watch import wait_until_offered
from emberline.config import PredictorsConfig
from emberline.predictor.fetch import FetchGrant
from emberline.predictor.versions import LEFT_OUT, MAX_PROJECT_FILES, PredictorVersions, PushSettings
from emberline.protocol.errors import BadInput, Forbidden, TooLarge
from emberline.protocol.prediction import Manifest, Pushed, Resources
from emberline.protocol.sizes import format_limit

MAX_HEADER_BYTES = 1 << 20  # of a long name, or of what pax adds to one: `tarfile` reads it whole
_LONG_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class _Member(tarfile.TarInfo):
    """A member with bounded further headers: a small compressed archive can have one that fills the memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _LONG_HEADERS and found.size > MAX_HEADER_BYTES:
            raise BadInput(f"the archive has a header of {format_limit(found.size)}, which is no name of a file")
        return found


class RemotePushes:
    """Adds versions of predictors to a data folder, for the server that offers them."""

    def __init__(self, home: Path, settings: PredictorsConfig, versions: PredictorVersions | None = None) -> None:
        self._home, self._settings = home, settings
        self._versions = versions or PredictorVersions(home)

    def check(self) -> None:
        """Raise Forbidden unless the operator allows pushes over HTTP."""
        if self._settings.remote_push == "off":
            raise Forbidden(
                'this server takes no models over HTTP: set [predictors] remote_push = "admins", or run '
                "`emberline push` on its machine"
            )

    def push(self, archive: bytes, name: str, resources: Resources) -> Pushed:
        """Unpack a project, push it and publish it. Blocks. Raises what `PredictorVersions.push` does."""
        self.check()
        left = self._settings.max_bytes - self._versions.used_bytes()
        lines: list[str] = []
        with tempfile.TemporaryDirectory(prefix="emberline-push-") as folder:
            project = Path(folder) / "project"
            unpack(archive, project, left)
            grant = FetchGrant(
                hosts=self._settings.fetch_hosts,
                allowed_networks=self._settings.allowed_networks,
                max_bytes=max(0, min(self._settings.max_fetched_bytes, left - folder_bytes(project))),
            )
            manifest = self._versions.push(
                project, PushSettings(name=name, resources=resources, fetch=grant), lines.append
            )
        return self._published(manifest, lines)

    def _published(self, manifest: Manifest, lines: list[str]) -> Pushed:
        store = ModelStore(self._home)
        publish(store, manifest, self._versions.path(manifest))
        wait_until_offered(store.root)
        return Pushed(id=manifest.model, version=manifest.version, digest=manifest.digest, notes=tuple(lines))


def unpack(archive: bytes, folder: Path, max_bytes: int) -> None:
    """Unpack a tar archive, compressed or not. Raises BadInput for anything but files and folders inside of it, and
    TooLarge beyond `max_bytes`."""
    n_bytes = n_files = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), tarinfo=_Member) as members:
            for member in members:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise BadInput(f"the archive has {member.name[:200]!r}, which is no file or folder inside of it")
                n_bytes, n_files = n_bytes + member.size, n_files + 1
                if n_bytes > max_bytes or n_files > MAX_PROJECT_FILES:
                    raise TooLarge(
                        f"the project does not fit: pushed models may take {format_limit(max(0, max_bytes))} more on "
                        f"this server ([predictors] max_bytes), in at most {MAX_PROJECT_FILES:,} files"
                    )
                target = folder.joinpath(*path.parts)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                content = members.extractfile(member)
                assert content is not None
                with target.open("wb") as file:
                    shutil.copyfileobj(content, file)
                target.chmod(0o755 if member.mode & 0o100 else 0o644)
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError) as error:
        raise BadInput(f"the body is not a tar archive of a project: {error}") from None


def pack(folder: Path) -> bytes:
    """A project's files as a compressed archive."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as archive:
        archive.add(folder, ".", filter=_packed)
    return found.getvalue()


def _packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if PurePosixPath(member.name).name in LEFT_OUT else member
