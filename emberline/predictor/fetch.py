"""The fetch phase of a push: the first `setup` with granted hosts, and the folders that `weights` of cog.yaml names.

What it fetches stays: files in the project become part of the version, and those in the caches of the usual libraries
lie in the model's store, which its versions share. Serving is offline afterwards.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from emberline.catalog.download import folder_bytes
from emberline.net.egress_policy import EgressPolicy
from emberline.predictor.cog_server import SOURCE, CogServer
from emberline.predictor.egress_proxy import EgressProxy
from emberline.predictor.project import Weights
from emberline.protocol.errors import BadInput, TooLarge, Unavailable, Unsupported
from emberline.protocol.prediction import Manifest
from emberline.protocol.sizes import format_limit
from emberline.supervisor.sandbox.enter import NOBODY
from emberline.supervisor.sandbox.program import Sandbox
from emberline.supervisor.sandbox.protections import find_protections

HUB = "huggingface.co"
CHECK_S = 0.5  # between two looks at how much was fetched
MAX_FETCHED_BYTES = 64 << 30


class FetchGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The operator's grant for the fetch phase. Without hosts, there is no such phase."""

    hosts: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()  # private ranges that hosts may be in
    max_bytes: int = MAX_FETCHED_BYTES
    is_operators: bool = True  # False: what the operator's token of the hub opens is refused
    insists: bool = False  # also where this machine cannot keep the predictor in


def run_setup(
    manifest: Manifest,
    folder: Path,
    grant: FetchGrant,
    secrets: Mapping[str, str],
    on_line: Callable[[str], None],
) -> Manifest:
    """Run the `setup` of the version in `folder` with the granted hosts. Returns its manifest with what that took.

    Raises Unavailable with the reason if it fails, and TooLarge if it fetches more than the grant says."""
    store = Path(manifest.store)
    store.mkdir(parents=True, exist_ok=True)
    before, began_s = folder_bytes(folder / "src") + folder_bytes(store), time.monotonic()
    for each in (folder / "src", store):
        _give(each, NOBODY)
    refused: list[str] = []
    look = _Look((folder / "src", store), before + grant.max_bytes)
    with tempfile.TemporaryDirectory(prefix="emberline-fetch-") as runtime:
        os.chmod(runtime, 0o711)
        egress = EgressPolicy(grant.allowed_networks, setting="[predictors] allowed_networks")
        proxy = EgressProxy(Path(runtime) / "proxy", grant.hosts, egress, refused.append)
        server: CogServer | None = None
        try:
            sandbox = Sandbox(find_protections(), insists=grant.insists)
            on_line(f"running setup with {', '.join(grant.hosts)}")
            log = folder / "logs" / "log"
            server = CogServer(manifest, folder, sandbox, dict(secrets), log, f"{runtime}/proxy")
            server.wait_ready(look)
            took_s = time.monotonic() - began_s
            server.stop()
        except Unavailable as error:
            if look.is_full:
                raise TooLarge(f"setup fetched more than {format_limit(grant.max_bytes)}, which a push may") from None
            raise Unavailable(f"{error.message}{f'; {refused[-1]}' if refused else ''}") from None
        finally:
            if server is not None:
                server.kill()
            proxy.close()
    for each in (folder / "src", store):
        _give(each, os.getuid())
    fetched = max(0, folder_bytes(folder / "src") + folder_bytes(store) - before)
    on_line(f"setup took {took_s:.1f} s and fetched {fetched / 2**20:.1f} MiB")
    return msgspec.structs.replace(manifest, setup_s=round(took_s, 3), fetched_bytes=fetched)


class _Look:
    """Looks now and then whether more was fetched than may be. Called often."""

    def __init__(self, folders: Sequence[Path], max_bytes: int) -> None:
        self._folders, self._max_bytes = folders, max_bytes
        self._next_s = 0.0
        self.is_full = False

    def __call__(self) -> bool:
        if (now_s := time.monotonic()) >= self._next_s:
            self.is_full = sum(map(folder_bytes, self._folders)) > self._max_bytes
            self._next_s = time.monotonic() + max(CHECK_S, 10 * (time.monotonic() - now_s))
        return self.is_full


def _give(folder: Path, user: int) -> None:
    """Make a user the owner of a folder and all in it, if root runs this. Links are not followed."""
    if os.geteuid() != 0:
        return
    os.chown(folder, user, -1)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(parent, name), user, -1, follow_symlinks=False)


# --- weights ----------------------------------------------------------------------------------------------------------


class Placed(msgspec.Struct, frozen=True):
    """Folders of `weights` that the predictor has to see."""

    folders: tuple[str, ...] = ()  # where they are; links in the project lead there
    mounts: tuple[tuple[str, str], ...] = ()  # outside of the project: where they are, and where they are seen


def place_weights(
    weights: Sequence[Weights], source: Path, shared: Path, grant: FetchGrant, on_line: Callable[[str], None]
) -> Placed:
    """Put the folders that `weights` names where the predictor looks for them: links in its project, so that versions
    and models share the bytes, which none of them can write. `source` is the version's copy of the project, `shared`
    the folder of all downloads."""
    folders, mounts = [], []
    for each in weights:
        found = _download(each, shared, grant, on_line) if each.repository else source / each.path
        if not found.exists():
            raise BadInput(f"`weights`: {each.name} is {each.path}, which the project does not have", param="weights")
        inside = os.path.relpath(each.target, SOURCE)
        if inside.startswith(".."):
            mounts.append((str(found), each.target))
            continue
        if (target := source / inside) == found:
            continue
        if target.exists():
            raise BadInput(f"`weights`: {each.name} has the target {each.target}, which the project has too")
        target.parent.mkdir(parents=True, exist_ok=True)
        if each.repository:
            folders.append(str(found))
            target.symlink_to(found)
        else:
            target.symlink_to(os.path.relpath(found, target.parent))
    return Placed(tuple(folders), tuple(mounts))


def _download(weights: Weights, shared: Path, grant: FetchGrant, on_line: Callable[[str], None]) -> Path:
    """The folder of a repository of the hub, downloaded unless it is there already."""
    if HUB not in grant.hosts:
        raise Unsupported(
            f"`weights`: {weights.name} is on {HUB}, which was not granted: push with --fetch-from {HUB}",
            param="weights",
        )
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        raise Unavailable(f"HF_HUB_OFFLINE is set, and `weights` {weights.name} is to be fetched from {HUB}")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils import disable_progress_bars, filter_repo_objects  # type: ignore[attr-defined]

    disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    token = None if grant.is_operators else False  # None: the operator's, where there is one
    include, exclude = list(weights.include) or None, list(weights.exclude) or None
    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(
            weights.repository, revision=weights.revision or None, files_metadata=True
        )
        listed = {item.rfilename: item.size or 0 for item in info.siblings or []}
        n_bytes = sum(
            listed[name] for name in filter_repo_objects(listed, allow_patterns=include, ignore_patterns=exclude)
        )
        if n_bytes > grant.max_bytes:
            most = format_limit(grant.max_bytes)
            raise TooLarge(f"{weights.repository} has {n_bytes / 2**20:,.1f} MiB, and {most} may be fetched")
        chosen = hashlib.sha256(msgspec.json.encode([info.sha, include, exclude])).hexdigest()[:16]
        folder = shared / f"{weights.repository.replace('/', '--')}-{chosen}"
        with locked(shared):
            if not folder.exists():
                on_line(f"fetching {weights.repository}, {n_bytes / 2**20:.1f} MiB")
                staging = folder.with_name(f".{folder.name}")
                snapshot_download(
                    weights.repository,
                    revision=info.sha,
                    local_dir=staging,
                    endpoint=endpoint,
                    token=token,
                    allow_patterns=include,
                    ignore_patterns=exclude,
                )
                shutil.rmtree(staging / ".cache", ignore_errors=True)
                staging.rename(folder)
        return folder
    except HfHubHTTPError as error:
        raise Unavailable(f"{HUB} refused {weights.repository}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise Unavailable(
            f"{weights.repository} could not be fetched: {error.strerror or error}; push again to go on"
        ) from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclusive among all pushes that write into the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def remove_unused(shared: Path, used: Collection[str]) -> None:
    """Remove the downloads that no version uses."""
    if shared.is_dir():
        with locked(shared):
            for folder in shared.iterdir():
                if folder.is_dir() and str(folder) not in used:
                    shutil.rmtree(folder, ignore_errors=True)
