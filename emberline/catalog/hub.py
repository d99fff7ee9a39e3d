"""Models from the Hugging Face Hub or a mirror (HF_ENDPOINT): weights and configuration only, never pickles or code.

HF_TOKEN (or the token of `hf auth login`), proxies and HF_HUB_OFFLINE are respected; offline, only the hub's own cache
on this machine is used.
"""

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from emberline.catalog.download import (
    AccessDenied,
    HashMismatch,
    NoNetwork,
    PullFailed,
    ReportProgress,
    room_for,
    watched,
)
from emberline.catalog.model_card import HubSource
from emberline.protocol.errors import BadInput, ModelNotFound
from emberline.weights.hf_checkpoint import folder_config
from emberline.weights.mmproj import best_mmproj

_SPEC = re.compile(r"hf:([\w.-]+/[\w.-]+?)(?:@([\w.-]+))?(?:/((?:[\w. -]+/)*[\w. -]+\.gguf))?")
# Which of a repository's GGUF files is preferred when none is named, best first.
_PREFERRED = ("q4_k_m", "q4_k_s", "q4_1", "q4_0", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "bf16", "f16", "f32")
_TEXT_FILE = re.compile(r"[\w.-]+\.json|tokenizer\.model|tiktoken\.model|chat_template\.jinja")
_SPARE_BYTES = 16 << 20
_ANSWER_S = 2.0  # after which a hub that has not answered is taken for one that cannot be reached


class HubFile(NamedTuple):
    name: str
    size: int
    sha256: str | None  # known for large files


class Fetched(NamedTuple):
    path: Path  # the GGUF file or the folder
    source: HubSource  # pinned to the commit
    sha256: dict[str, str]  # of the files, by name


def parse(spec: str) -> HubSource:
    """`hf:org/repo`, `hf:org/repo@revision` or `hf:org/repo/file.gguf`."""
    match = _SPEC.fullmatch(spec)
    if match is None or ".." in spec:
        raise BadInput(f"{spec!r} is not of the form hf:org/repo, hf:org/repo@revision or hf:org/repo/file.gguf")
    return HubSource(repo=match[1], revision=match[2], file=match[3])


def spec_of(source: HubSource) -> str:
    """Text form of the source, which `parse` reads."""
    revision = f"@{source.revision}" if source.revision else ""
    return f"hf:{source.repo}{revision}" + (f"/{source.file}" if source.file else "")


def fetch(source: HubSource, folder: Path, report: ReportProgress | None = None) -> Fetched:
    """Download the model's files into `folder`; complete files of an interrupted download are kept.

    Offline, the path is in the hub's own cache instead.
    """
    if is_offline():
        with _translated_errors(source):
            return _cached(source)
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    with _translated_errors(source):
        info = HfApi(endpoint=endpoint).model_info(source.repo, revision=source.revision, files_metadata=True)
        listed = [
            HubFile(item.rfilename, item.size or 0, item.lfs.sha256 if item.lfs else None)
            for item in info.siblings or []
        ]
        files = choose(listed, source)
        total_bytes = sum(file.size for file in files)
        folder.mkdir(parents=True, exist_ok=True)
        sha256: dict[str, str] = {}
        with room_for(total_bytes + _SPARE_BYTES, folder), watched(folder, total_bytes, report):
            for file in files:
                hf_hub_download(source.repo, file.name, revision=info.sha, local_dir=folder, endpoint=endpoint)
                sha256[file.name] = _checked(folder / file.name, file)
                if file.name == "config.json":
                    folder_config(folder)  # refuses an unsupported model before its weights are downloaded
    pinned = HubSource(source.repo, info.sha, source.file)
    return Fetched(folder / files[0].name if files[0].name.endswith(".gguf") else folder, pinned, sha256)


def is_offline() -> bool:
    """True if the user forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def answers_for(source: HubSource, file: str, limit_s: float = _ANSWER_S) -> bool:
    """True if the hub says within `limit_s` that it has the file and that we may download it."""
    if is_offline():
        return False
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(source.repo, file, revision=source.revision, endpoint=os.environ.get("HF_ENDPOINT") or None)
    answered = threading.Event()

    def ask() -> None:
        with suppress(Exception):  # whatever is wrong, the caller has a mirror
            get_hf_file_metadata(url, timeout=limit_s)
            answered.set()

    thread = threading.Thread(target=ask, daemon=True)  # a name server that does not answer has no timeout of its own
    thread.start()
    thread.join(limit_s)
    return answered.is_set()


def fetch_files(
    source: HubSource, sha256: Mapping[str, str], n_bytes: int, folder: Path, report: ReportProgress | None = None
) -> None:
    """Download files of known content into `folder`. A file that is another one is deleted and raises HashMismatch."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    endpoint = os.environ.get("HF_ENDPOINT") or None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _translated_errors(source), room_for(n_bytes + _SPARE_BYTES, folder), watched(folder, n_bytes, report):
            for name, digest in sha256.items():
                hf_hub_download(source.repo, name, revision=source.revision, local_dir=folder, endpoint=endpoint)
                _checked(folder / name, HubFile(name, 0, digest))
    finally:
        shutil.rmtree(folder / ".cache", ignore_errors=True)


def choose(files: Sequence[HubFile], source: HubSource) -> list[HubFile]:
    """The files to download: the named GGUF, or the safetensors with their configuration, or the preferred GGUF, with
    the mmproj file beside it."""
    top = [file for file in files if "/" not in file.name]
    if source.file is not None:
        wanted = [file for file in files if file.name == source.file]
        if not wanted:
            raise ModelNotFound(f"{source.repo} has no file {source.file}")
        return [*wanted, *_mmproj_of(wanted[0], files)]
    texts = [file for file in top if _TEXT_FILE.fullmatch(file.name)]
    tensors = [file for file in top if file.name.endswith(".safetensors")]
    tensors = [file for file in tensors if file.name.startswith("model")] or tensors  # not a copy in another layout
    if tensors and any(file.name == "config.json" for file in texts):
        return sorted(texts, key=lambda file: file.name != "config.json") + tensors  # config.json first
    named = {file.name.lower(): file for file in top if file.name.lower().endswith(".gguf")}
    ggufs = {name: file for name, file in named.items() if best_mmproj([name]) is None}
    for kind in _PREFERRED:
        for name in sorted(ggufs):
            if re.search(rf"(?<![a-z0-9]){kind}(?![a-z0-9_])", name):
                return [ggufs[name], *_mmproj_of(ggufs[name], files)]
    if len(ggufs) == 1:
        (file,) = ggufs.values()
        return [file, *_mmproj_of(file, files)]
    raise ModelNotFound(
        f"{source.repo} has neither safetensors with a config.json nor a GGUF that can be chosen;"
        f" name one of its files: hf:{source.repo}/FILE.gguf"
    )


def _mmproj_of(model: HubFile, files: Sequence[HubFile]) -> list[HubFile]:
    """The file of the vision tower in the folder of a GGUF file, if there is one."""
    folder = model.name.rpartition("/")[0]
    beside = {file.name: file for file in files if file.name.rpartition("/")[0] == folder and file is not model}
    name = best_mmproj(beside)
    return [] if name is None else [beside[name]]


def _checked(path: Path, file: HubFile) -> str:
    """The file's sha256. One that differs from the hub's is deleted, so that the next pull downloads it again."""
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if file.sha256 in (None, sha256):
        return sha256
    path.unlink()
    raise HashMismatch(f"{file.name} did not arrive whole: its sha256 is not the published one; pull again")


def _cached(source: HubSource) -> Fetched:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(source.repo, revision=source.revision, local_files_only=True)
    except FileNotFoundError:
        raise ModelNotFound(
            f"HF_HUB_OFFLINE is set and {source.repo} is not in the hub's cache on this machine"
        ) from None
    folder = Path(found)
    listed = [HubFile(str(path.relative_to(folder)), 0, None) for path in folder.rglob("*") if path.is_file()]
    first = choose(listed, source)[0].name
    pinned = HubSource(source.repo, folder.name, source.file)
    return Fetched(folder / first if first.endswith(".gguf") else folder, pinned, {})


@contextmanager
def _translated_errors(source: HubSource) -> Iterator[None]:
    """Translate the hub's errors into ours, which say what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:  # before it asks
        raise BadInput(f"{source.repo[:100]!r} cannot be a repository of the hub: {str(error)[:200]}") from None
    except errors.LocalEntryNotFoundError as error:  # raised for a file when there is no connection
        raise _unreachable(source) from error
    except (errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        raise ModelNotFound(f"{source.repo} has no revision {source.revision or 'main'} with that file") from error
    except errors.RepositoryNotFoundError as error:  # also for gated ones: the hub hides that a private one exists
        raise _denied(source) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise _denied(source) from error
        raise PullFailed(f"the hub refused {source.repo}: {str(error).splitlines()[0]}") from error
    except (errors.HTTPError, ConnectionError) as error:  # type: ignore[attr-defined]
        raise _unreachable(source) from error


def _unreachable(source: HubSource) -> NoNetwork:
    return NoNetwork(
        f"could not reach the hub for {source.repo}, or the transfer broke off: check the network, HTTPS_PROXY and"
        " HF_ENDPOINT and pull again; files that arrived whole are kept"
    )


def _denied(source: HubSource) -> AccessDenied:
    return AccessDenied(
        f"the hub has no {source.repo}, or wants a token for it: accept its licence on the model's page if it has"
        " one, and set HF_TOKEN (or run `hf auth login`)"
    )
