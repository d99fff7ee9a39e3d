"""Pushes over HTTP: an archive of a project from a key that the operator lets push, an operator's or an account's.

An archive is unpacked by name and size alone: regular files within the folder, no links, owners or modes but the bit
that makes a file executable. Pushed models share a quota on disk, and those of each account have one of their own.
"""

import io
import lzma
import shutil
import tarfile
import tempfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Self

import msgspec

from emberline.catalog.download import folder_bytes
from emberline.catalog.model_card import pushed_id
from emberline.catalog.model_store import ModelStore
from emberline.catalog.predictor_cards import publish
from emberline.catalog.store_watch import wait_until_offered
from emberline.config import PredictorsConfig
from emberline.predictor.fetch import FetchGrant
from emberline.predictor.output_log import last_lines
from emberline.predictor.project import read_project
from emberline.predictor.versions import (
    LEFT_OUT,
    MAX_PROJECT_FILES,
    OWNER,
    PredictorVersions,
    PushSettings,
    check_name,
)
from emberline.protocol.errors import BadInput, EmberlineError, Forbidden, ModelNotFound, TooLarge
from emberline.protocol.prediction import LogEnd, Manifest, Pushed, Resources, VersionRow
from emberline.protocol.sizes import format_limit

MAX_HEADER_BYTES = 256 << 10  # of a long name, or of what pax adds to one: `tarfile` reads it whole
_LONG_HEADERS = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)


class _Member(tarfile.TarInfo):
    """A member with bounded further headers: a small compressed archive can have one that fills the memory, or that
    `tarfile` takes hours to read. Of what pax adds, only the name counts."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.type in _LONG_HEADERS and found.size > MAX_HEADER_BYTES:
            raise BadInput(f"the archive has a header of {format_limit(found.size)}, which is no name of a file")
        if found.type == tarfile.GNUTYPE_SPARSE:  # with a map of any length
            raise BadInput("the archive has a sparse file: make it without `--sparse`")
        if found.size < 0:  # which would lead back in the archive
            raise BadInput("the archive has a file whose size is below 0")
        return found

    def _proc_pax(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """The member that the header adds to."""
        assert archive.fileobj is not None
        fields = _pax_fields(archive.fileobj.read(-(-self.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)[: self.size])
        if "size" in fields or any(name.startswith("GNU.sparse.") for name in fields):
            raise BadInput("the archive has a sparse file, or one of 8 GiB or more")
        found = self.fromtarfile(archive)
        if "path" in fields and self.type != tarfile.XGLTYPE:
            found.name = fields["path"]
        return found


def _pax_fields(header: bytes) -> dict[str, str]:
    """The records "LENGTH NAME=VALUE\n" of a header. Raises BadInput. Takes linear time."""
    found, at = {}, 0
    while at < len(header) and header[at]:
        digits, space, _ = header[at : at + 8].partition(b" ")
        end = at + int(digits) if space and digits.isdigit() else 0
        name, equals, value = header[at + len(digits) + 1 : max(0, end - 1)].partition(b"=")
        if not equals or header[end - 1 : end] != b"\n":
            raise BadInput("the archive has a pax header that is not valid")
        found[name.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        at = end
    return found


class RemotePushes:
    """Adds versions of predictors to a data folder, for the server that offers them."""

    def __init__(self, home: Path, settings: PredictorsConfig, versions: PredictorVersions | None = None) -> None:
        self._home, self._settings = home, settings
        self._versions = versions or PredictorVersions(home)

    def check(self, account: str) -> None:
        """Raise Forbidden unless the operator lets the account push over HTTP; `account` empty: the operator."""
        if self._settings.remote_push == "off":
            raise Forbidden(
                'this server takes no models over HTTP: set [predictors] remote_push = "admins" or "accounts", or run '
                "`emberline push` on its machine"
            )
        if account and self._settings.remote_push != "accounts":
            raise Forbidden(
                "this server takes models from operators' keys alone: the operator can set "
                '[predictors] remote_push = "accounts"'
            )

    def push(self, archive: bytes, name: str, resources: Resources, account: str = "") -> Pushed:
        """Unpack a project, push it as a model of the account (empty: the operator) and publish it. Blocks.

        Raises what `PredictorVersions.push` does, Conflict if a push of the account runs, and Forbidden for bounds that
        accounts do not get."""
        self.check(account)
        if not account:
            return self._push(archive, name, resources, "")
        self._check_resources(resources)
        with self._versions.sole_push(account):
            try:
                return self._push(archive, name, resources, account)
            except EmberlineError:
                self._versions.remove_unused()
                raise

    def versions(self, account: str, name: str) -> list[VersionRow]:
        """The versions of the account's model, oldest first. Raises ModelNotFound."""
        self.check(account)
        model = pushed_id(account, check_name(name))
        entry = ModelStore(self._home).find(model)
        if entry is None or entry.card.id != model or entry.card.predictor is None:
            raise ModelNotFound(f"no model {OWNER}/{check_name(name)} was pushed here", param="model")
        current = entry.card.predictor.version
        return [
            VersionRow(version=each.version, digest=each.digest, served=each.version == current)
            for each in self._versions.list(model)
        ]

    def log(self, account: str, name: str, version: int | None, n_lines: int) -> LogEnd:
        """The last lines of the log of the account's model; `version` None: of the served one. Blocks.

        Raises ModelNotFound."""
        served = next((row.version for row in self.versions(account, name) if row.served), 0)
        manifest = self._versions.find(pushed_id(account, check_name(name)), served if version is None else version)
        return LogEnd(version=manifest.version, data=last_lines(self._versions.log_path(manifest), n_lines))

    def roll_back(self, account: str, name: str, version: int | None) -> list[VersionRow]:
        """Serve an earlier version of the account's model; None: the one before the served one. Blocks."""
        rows = self.versions(account, name)
        served = next((row.version for row in rows if row.served), 0)
        earlier = [row.version for row in rows if row.version < served]
        if version is None and not earlier:
            raise BadInput(f"{OWNER}/{check_name(name)} has no version before {served}", param="version")
        wanted = earlier[-1] if version is None else version
        self._publish(self._versions.find(pushed_id(account, check_name(name)), wanted))
        return self.versions(account, name)

    def remove(self, account: str, name: str) -> None:
        """Remove the account's model with all its versions. Blocks."""
        self.versions(account, name)
        model, store = pushed_id(account, check_name(name)), ModelStore(self._home)
        store.remove(model)
        self._versions.remove(model)
        wait_until_offered(store.root)

    def _check_resources(self, resources: Resources) -> None:
        """Raise Forbidden for bounds beyond those that models of accounts may have."""
        most = Resources(memory_bytes=self._settings.account_memory_bytes, cpus=self._settings.account_cpus)
        for name, value in msgspec.structs.asdict(resources).items():
            if value > (limit := getattr(most, name)):
                raise Forbidden(f"`{name}` of an account's model is at most {limit:,} on this server", param=name)

    def _push(self, archive: bytes, name: str, resources: Resources, account: str) -> Pushed:
        left = self._settings.max_bytes - self._versions.used_bytes()
        setting = "max_bytes"
        if account and (own := self._settings.account_bytes - self._versions.bytes_of(account)) < left:
            left, setting = own, "account_bytes"
        lines: list[str] = []
        with tempfile.TemporaryDirectory(prefix="emberline-push-") as folder:
            project = Path(folder) / "project"
            unpack(archive, project, left, setting)
            if account and read_project(project).gpu:
                raise Forbidden("models of accounts get no GPU on this server")
            grant = FetchGrant(
                hosts=self._settings.fetch_hosts,
                allowed_networks=self._settings.allowed_networks,
                max_bytes=max(0, min(self._settings.max_fetched_bytes, left - folder_bytes(project))),
                is_operators=not account,
            )
            manifest = self._versions.push(
                project, PushSettings(name=name, account=account, resources=resources, fetch=grant), lines.append
            )
        if account and (n_bytes := self._versions.bytes_of(account)) > self._settings.account_bytes:
            self._versions.discard(manifest)
            raise TooLarge(
                f"the account's models would take {format_limit(n_bytes)} with their packages and weights, of the "
                f"{format_limit(self._settings.account_bytes)} that they may ([predictors] account_bytes): remove one"
            )
        return self._published(manifest, lines)

    def _published(self, manifest: Manifest, lines: list[str]) -> Pushed:
        self._publish(manifest)
        model = f"{OWNER}/{manifest.model.rpartition('/')[2]}"  # as its account calls it
        return Pushed(id=model, version=manifest.version, digest=manifest.digest, notes=tuple(lines))

    def _publish(self, manifest: Manifest) -> None:
        store = ModelStore(self._home)
        publish(store, manifest, self._versions.path(manifest))
        wait_until_offered(store.root)


def unpack(archive: bytes, folder: Path, max_bytes: int, setting: str = "max_bytes") -> None:
    """Unpack a tar archive, compressed or not. Raises BadInput for anything but files and folders inside of it, and
    TooLarge beyond `max_bytes`."""
    n_bytes = n_files = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), tarinfo=_Member) as members:
            while (member := members.next()) is not None:
                members.members.clear()  # type: ignore[attr-defined]  # with their names, which may be long
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
                    raise BadInput(f"the archive has {member.name[:200]!r}, which is no file or folder inside of it")
                n_bytes, n_files = n_bytes + member.size, n_files + 1
                if n_bytes > max_bytes or n_files > MAX_PROJECT_FILES:
                    raise TooLarge(
                        f"the project does not fit: pushed models may take {format_limit(max(0, max_bytes))} more on "
                        f"this server ([predictors] {setting}), in at most {MAX_PROJECT_FILES:,} files"
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
    except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, ValueError, RecursionError) as error:
        raise BadInput(f"the body is not a tar archive of a project: {error}") from None


def pack(folder: Path) -> bytes:
    """A project's files as a compressed archive."""
    found = io.BytesIO()
    with tarfile.open(fileobj=found, mode="w:gz") as archive:
        archive.add(folder, ".", filter=_packed)
    return found.getvalue()


def _packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if PurePosixPath(member.name).name in LEFT_OUT else member
