"""Versions of predictors on disk, and `push`, which adds one.

`$EMBERLINE_HOME/predictors/NAME/vN` has a version: its manifest, the project's files, its log. Environments are shared
(`environments`). A version is complete before the model store names it, and is never changed afterwards.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from emberline.catalog.download import folder_bytes
from emberline.catalog.model_card import OF_ACCOUNTS, PUSHED, pushed_id
from emberline.predictor import environments
from emberline.predictor.environments import Environment
from emberline.predictor.fetch import FetchGrant, locked, place_weights, remove_unused, run_setup
from emberline.predictor.image_labels import read_image
from emberline.predictor.project import Project, read_project
from emberline.predictor.schema import openapi, read_signature
from emberline.protocol.errors import BadInput, Conflict, ModelNotFound, TooLarge, Unavailable, Unsupported
from emberline.protocol.prediction import Manifest, Resources
from emberline.protocol.sizes import format_limit
from emberline.supervisor.sandbox.containers import find_image

OWNER = PUSHED.removesuffix("/")
MANIFEST = "manifest.json"
GPU_NOTICE = (
    "it gets a whole GPU, which no other model shares: nothing keeps two tenants of one apart. The GPU's driver can be "
    "reached from the sandbox: run code that you do not trust on a machine of its own"
)
STAGING = ".push-"  # of a version that is not complete; its name goes on with the id of the process
STORE = "store"  # of what setup fetched, for all versions of a model
MAX_PROJECT_BYTES = 4 << 30
MAX_PROJECT_FILES = 50_000
LEFT_OUT = {".git", ".hg", "__pycache__", ".venv", "venv", ".cog", "node_modules"}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_OWNER_FOLDER = re.compile(r"[a-z0-9][a-z0-9._-]*")
_FOLDER = re.compile(r"v([1-9]\d{0,8})")


# Takes the folder of environments, the requirements, the version of Python and where progress is told.
Build = Callable[[Path, Sequence[str], str, Callable[[str], None]], Environment]


class PushSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a version that the person who pushes it decides."""

    name: str = ""  # empty: of cog.yaml's image, or of the folder
    account: str = ""  # whose model it is; empty: the operator's
    resources: Resources = Resources()
    secrets: tuple[str, ...] = ()
    max_bytes: int = MAX_PROJECT_BYTES
    fetch: FetchGrant = FetchGrant()
    image_registries: tuple[str, ...] = ()  # from which an image may be pulled
    granted: dict[str, str] = {}  # values of secrets for the fetch phase, by name


class PredictorVersions:
    """All predictors of a data folder."""

    def __init__(self, home: Path, build: Build = environments.build) -> None:
        """`build` makes the environment of a version."""
        self._build = build
        self.root = home / "predictors"
        self._environments = self.root / ".environments"
        self._weights = self.root / ".weights"

    def push(self, folder: Path, settings: PushSettings, on_line: Callable[[str], None]) -> Manifest:
        """Add the project as the next version of its model. Blocks, for as long as its packages take to install.

        Raises BadInput, Unsupported or TooLarge, which say what the project must change, and Unavailable if its setup
        fails in the fetch phase."""
        with self._uses_shared(fcntl.LOCK_SH):
            return self._push(folder, settings, on_line)

    def _push(self, folder: Path, settings: PushSettings, on_line: Callable[[str], None]) -> Manifest:
        project = read_project(folder)
        for notice in project.notices:
            on_line(notice)
        if project.gpu:
            on_line(GPU_NOTICE)
        model = pushed_id(settings.account, model_name(project, settings.name))
        signature = read_signature(project.source.read_bytes(), project.reference, project.folder)
        slots = signature.slots or project.max_concurrency or 1
        if slots > 1 and not signature.is_async:
            raise Unsupported(f"{project.reference}: {slots} concurrent predictions need `async def`")
        environment = self._build(self._environments, project.requirements, project.python, on_line)

        def fill(staging: Path, version: int) -> Manifest:
            digest = _copy(project.folder, staging / "src", settings.max_bytes)
            document = msgspec.json.encode(openapi(signature))
            (staging / "src" / ".cog").mkdir(exist_ok=True)
            (staging / "src" / ".cog" / "openapi_schema.json").write_bytes(document)
            weights = place_weights(project.weights, staging / "src", self._weights, settings.fetch, on_line)
            manifest = Manifest(
                model=model,
                account=settings.account,
                version=version,
                digest="",
                reference=project.reference,
                interpreter=environment.interpreter,
                folders=(*environment.folders, *weights.folders),
                store=str(self.folder(model) / STORE) if settings.fetch.hosts else "",
                mounts=weights.mounts,
                slots=slots,
                streams=signature.streams,
                input=signature.input,
                output=signature.output,
                environment=dict(project.environment),
                secrets=settings.secrets,
                gpu=project.gpu,
                resources=settings.resources,
            )
            manifest = _with_digest(manifest, digest + environment.key)
            if settings.fetch.hosts:
                secrets = {name: value for name, value in settings.granted.items() if name in settings.secrets}
                manifest = run_setup(manifest, staging, settings.fetch, secrets, on_line)
            return manifest

        return self._add(model, fill, on_line)

    def push_image(self, reference: str, settings: PushSettings, on_line: Callable[[str], None]) -> Manifest:
        """Add a container image, made by `cog build`, as the next version of its model. It is pulled if its registry
        is granted.

        Raises BadInput for an image that is not here or has no predictor, and Unavailable where no engine runs."""
        engine, image = find_image(reference, settings.image_registries)
        found = read_image(image)
        if found.gpu:
            on_line(GPU_NOTICE)
        name = check_name(settings.name or reference.partition("@")[0].rpartition("/")[2].partition(":")[0])
        model = pushed_id("", name)

        def fill(staging: Path, version: int) -> Manifest:
            manifest = Manifest(
                model=model,
                version=version,
                digest="",
                reference=reference,
                image=image.digest,
                engine=engine.kind,
                command=found.command,
                slots=found.slots,
                streams=found.signature.streams,
                input=found.signature.input,
                output=found.signature.output,
                secrets=settings.secrets,
                gpu=found.gpu,
                resources=settings.resources,
            )
            return _with_digest(manifest, image.digest)

        return self._add(model, fill, on_line)

    def _add(self, model: str, fill: Callable[[Path, int], Manifest], on_line: Callable[[str], None]) -> Manifest:
        """Add a version, whose files `fill` writes to a folder. Other pushes of the model wait."""
        model_folder = self.folder(model)
        with locked(model_folder), ExitStack() as at_end:
            _remove_staging(model_folder)
            staging = model_folder / f"{STAGING}{os.getpid()}"
            at_end.callback(shutil.rmtree, staging, ignore_errors=True)
            (staging / "logs").mkdir(parents=True)
            version = 1 + max((version.version for version in self.list(model)), default=0)
            manifest, added = fill(staging, version), model_folder / f"v{version}"
            own = ((path.replace(f"{staging}/", f"{added}/", 1), seen) for path, seen in manifest.mounts)
            manifest = msgspec.structs.replace(manifest, mounts=tuple(own))  # the project's weights are renamed with it
            (staging / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
            staging.rename(added)
            if manifest.interpreter and not Path(manifest.interpreter).exists():
                shutil.rmtree(added)
                raise Unavailable("its packages were removed with another model meanwhile: push it again")
        on_line(f"{manifest.model} version {version}")
        return manifest

    def list(self, model: str) -> list[Manifest]:
        """All versions of a model, oldest first."""
        return _manifests(self.folder(model))

    def find(self, model: str, version: int) -> Manifest:
        """A version of a model. Raises ModelNotFound."""
        known = self.list(model)
        found = next((each for each in known if each.version == version), None)
        if found is None:
            numbers = ", ".join(str(each.version) for each in known) or "none"
            raise ModelNotFound(f"{model} has no version {version}; there are {numbers}")
        return found

    def path(self, manifest: Manifest) -> Path:
        """The manifest's file, which the model store names."""
        return self.folder(manifest.model) / f"v{manifest.version}" / MANIFEST

    def log_path(self, manifest: Manifest) -> Path:
        """The current file of a version's log."""
        return self.path(manifest).parent / "logs" / "log"

    def folder(self, model: str) -> Path:
        """The folder of a model's versions. Raises ModelNotFound for a name that no predictor can have."""
        owner, _, name = model.rpartition("/")
        is_of_account = owner.startswith(OF_ACCOUNTS) and _OWNER_FOLDER.fullmatch(owner.removeprefix(OF_ACCOUNTS))
        if not (owner == OWNER or is_of_account) or not _NAME.fullmatch(name):
            raise ModelNotFound(f"{model[:100]} is not a predictor: their names are {OWNER}/NAME")
        return self.root / name if owner == OWNER else self._folder_of(owner) / name

    def _folder_of(self, owner: str) -> Path:
        """The folder of an account's models: no model of the operator's has a name that begins so."""
        return self.root / f"@{owner.removeprefix(OF_ACCOUNTS)}"

    def _owner_folder(self, account: str) -> Path:
        return self._folder_of(pushed_id(account, "x").rpartition("/")[0])

    def _folders(self) -> Iterator[Path]:
        """The folders of all models, of accounts and the operator."""
        yield from self.root.glob("[!.@]*")
        yield from self.root.glob("@*/[!.]*")

    def bytes_of(self, account: str) -> int:
        """Bytes that the models of an account take, with the environments and weights that they use."""
        folder = self._owner_folder(account)
        used = {
            shared
            for model in folder.glob("[!.]*")
            for manifest in _manifests(model)
            for path in (*manifest.folders, *(each for each, _ in manifest.mounts))
            for root in (self._environments, self._weights)
            if (shared := _child(root, Path(path))) is not None
        }
        return sum(map(folder_bytes, (folder, *used)))

    def used_bytes(self) -> int:
        """Bytes that all pushed models take. Removes what pushes that were killed have left behind."""
        for folder in (self._environments, *self._folders()):
            with suppress(OSError), (folder / ".lock").open("r+") as lock:  # a push that runs has it
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_staging(folder)
        return folder_bytes(self.root)

    def remove(self, model: str) -> None:
        """Remove all versions of a model, and the environments and weights that no other model uses."""
        shutil.rmtree(self.folder(model), ignore_errors=True)
        self.remove_unused()

    def discard(self, manifest: Manifest) -> None:
        """Remove a version that was never served, and what no other version uses."""
        shutil.rmtree(self.path(manifest).parent, ignore_errors=True)
        if not self.list(manifest.model):
            shutil.rmtree(self.folder(manifest.model), ignore_errors=True)
        self.remove_unused()

    def remove_unused(self) -> None:
        """Remove the environments and weights that no version uses. While a push runs they stay for a later call: its
        version does not name them yet."""
        with suppress(BlockingIOError), self._uses_shared(fcntl.LOCK_EX | fcntl.LOCK_NB):
            self._remove_unused()

    @contextmanager
    def _uses_shared(self, mode: int) -> Iterator[None]:
        """Hold the lock of environments and weights: shared by pushes, and exclusive where some are removed."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".shared.lock").open("w") as lock:
            fcntl.flock(lock, mode)
            yield

    @contextmanager
    def sole_push(self, account: str) -> Iterator[None]:
        """Hold the account's lock, among all processes. Raises Conflict while another push of the account has it."""
        folder = self._owner_folder(account)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Conflict("another push of this account has not ended: wait for it") from None
            yield

    def _remove_unused(self) -> None:
        left = [manifest for folder in self._folders() for manifest in _manifests(folder)]
        used = {each for manifest in left for each in (*manifest.folders, *(path for path, _ in manifest.mounts))}
        remove_unused(self._weights, used)
        environments.remove_unused(self._environments, used)


def model_name(project: Project, given: str) -> str:
    """The name after @me/: the given one, else of the project's image, else of its folder. Raises BadInput."""
    return check_name(given or project.image.rpartition("/")[2].partition(":")[0] or project.folder.resolve().name)


def check_name(given: str) -> str:
    """A name as part of a model's id. Raises BadInput."""
    name = given.lower().removeprefix(f"{OWNER}/").replace(" ", "-")
    if not _NAME.fullmatch(name):
        raise BadInput(f"{name[:80]!r} cannot be a model's name: use letters, digits, '.', '_' and '-'", param="name")
    return name


def _manifests(folder: Path) -> list[Manifest]:
    """The versions in a model's folder, oldest first."""
    paths = [path for path in folder.glob(f"v*/{MANIFEST}") if _FOLDER.fullmatch(path.parent.name)]
    found = [msgspec.json.decode(path.read_bytes(), type=Manifest) for path in paths]
    return sorted(found, key=lambda manifest: manifest.version)


def _child(root: Path, path: Path) -> Path | None:
    """The folder in `root` that has the path. Returns None if the path is elsewhere."""
    return root / path.relative_to(root).parts[0] if path.is_relative_to(root) and path != root else None


def _remove_staging(folder: Path) -> None:
    """Remove the incomplete versions or environments in a folder. The caller has its lock."""
    for name in (STAGING, environments.STAGING):
        for abandoned in folder.glob(f"{name}*"):
            shutil.rmtree(abandoned, ignore_errors=True)


def _with_digest(manifest: Manifest, contents: str) -> Manifest:
    """The manifest with the digest of its contents and its settings, whatever the version's number."""
    settled = contents + msgspec.json.encode(msgspec.structs.replace(manifest, version=0)).hex()
    return msgspec.structs.replace(manifest, digest=hashlib.sha256(settled.encode()).hexdigest()[:32])


def _copy(source: Path, target: Path, max_bytes: int) -> str:
    """Copy a project's files so that every user can read them. Returns a digest of their names and contents.

    Symbolic links are followed within the project, and refused if they lead out of it."""
    digest, n_bytes, n_files = hashlib.sha256(), 0, 0
    root = source.resolve()
    for path, relative in _files(root):
        if not path.resolve().is_relative_to(root):
            raise BadInput(f"{relative} is a link that leads out of the project")
        n_files, n_bytes = n_files + 1, n_bytes + path.stat().st_size
        if n_bytes > max_bytes or n_files > MAX_PROJECT_FILES:
            raise TooLarge(
                f"the project has more than {format_limit(max_bytes)} or {MAX_PROJECT_FILES:,} files, which is more "
                "than may be pushed: let `setup` load large files"
            )
        copied = target / relative
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copied)
        copied.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        with copied.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{relative}\0{content}\n".encode("utf-8", "surrogatepass"))
    for folder in [target, *(each for each in target.rglob("*") if each.is_dir())]:
        folder.chmod(0o755)
    return digest.hexdigest()


def _files(root: Path) -> Iterator[tuple[Path, Path]]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in LEFT_OUT)
        for name in sorted(names):
            path = Path(folder, name)
            if path.is_file():
                yield path, path.relative_to(root)
