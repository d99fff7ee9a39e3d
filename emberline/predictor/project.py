"""A Cog project as its author wrote it: `cog.yaml`, read without running anything of the project."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, Unsupported

CONFIG = "cog.yaml"
MAX_CONFIG_BYTES = 1 << 20
OLDEST_MINOR = 10  # of Python 3, that Cog's server runs on
MAX_ALIASES = 16  # of YAML: each can double what comes of the file
_VERSION = re.compile(r"3\.\d{1,2}(\.\d{1,3})?")
DPKG = Path("/var/lib/dpkg/info")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A requirement: a name, extras, versions and a marker, in one line. No address, path, option or variable of the
# environment, which pip would follow: code of a source package would run outside of the sandbox.
_REQUIREMENT = re.compile(
    r"(?!.*[ \t]-)[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._ -]*\])?[ \t]*([<>=!~][A-Za-z0-9.*+!_<>=~, \t-]*)?"
    r"""(;[A-Za-z0-9.*+!_<>=~,'"() \t-]*)?"""
)


# A repository of the hub in `weights`: hf://org/name, with a revision if there is one.
_HUB = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+))?/?")


_LEFT_OUT = {
    "train": "`train` is left out: training is not supported",
    "observability": "`observability` is left out: nothing is exported, and a package that the code imports for it "
    "must be a requirement",
}


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """A folder of `weights`: from the project or from a repository of the hub, and where the predictor looks for it."""

    name: str
    target: str  # an absolute path inside
    path: str = ""  # of the project
    repository: str = ""  # "org/name"; empty: it is in the project
    revision: str = ""
    include: tuple[str, ...] = ()  # patterns of file names
    exclude: tuple[str, ...] = ()


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A project to be served, and its needs."""

    folder: Path
    reference: str  # "predict.py:Predictor"
    python: str  # "3.11"; empty: any
    requirements: tuple[str, ...]
    max_concurrency: int  # of cog.yaml; 0: it says nothing
    gpu: bool
    environment: Mapping[str, str]
    image: str  # "r8.im/me/name"; empty: none is named
    weights: tuple[Weights, ...] = ()
    notices: tuple[str, ...] = ()  # parts that are left out, for the person who pushes it

    @property
    def source(self) -> Path:
        """The file of the predictor."""
        return self.folder / self.reference.partition(":")[0]


def read_project(folder: Path, packages: Path = DPKG) -> Project:
    """Read a project folder. `packages`: the folder in which Debian's package manager keeps its lists.

    Raises BadInput, or Unsupported naming what this server cannot do for it."""
    import yaml  # not at every start of a server

    path = folder / CONFIG
    if not path.is_file():
        raise BadInput(f"there is no {CONFIG}: the folder is not a Cog project")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise BadInput(f"{CONFIG} is too large")
    try:
        raw = path.read_bytes()
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(raw, yaml.SafeLoader)) > MAX_ALIASES:
            raise BadInput(f"{CONFIG} has more than {MAX_ALIASES} aliases (`*NAME`): write them out")
        given = yaml.safe_load(raw)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise BadInput(f"{CONFIG} is not YAML: {str(error)[:300]}") from None
    if not isinstance(given, dict):
        raise BadInput(f"{CONFIG} must be a mapping")
    build = _mapping(given, "build")
    for name in ("run", "pre_install"):
        if build.get(name):
            raise Unsupported(
                f"`build.{name}` runs commands in a container builder, which this server has none of: remove it if "
                "wheels of `build.python_requirements` do the same, or build the image elsewhere (`push --image`)",
                param=f"build.{name}",
            )
    _check_system_packages(build, packages)
    reference = given.get("run") or given.get("predict")
    if not isinstance(reference, str) or reference.count(":") != 1 or not reference.partition(":")[0].endswith(".py"):
        only = " It has `train`, and training is not supported." if given.get("train") else ""
        raise BadInput(f'{CONFIG}: `run` must name a file and a class, as "run.py:Runner".{only}', param="run")
    project = Project(
        folder=folder,
        reference=reference,
        python=_python(build),
        requirements=_requirements(folder, build),
        max_concurrency=_concurrency(given),
        gpu=bool(build.get("gpu")),
        environment=_environment(given),
        image=str(given.get("image") or ""),
        weights=_weights(folder, given),
        notices=tuple(notice for name, notice in _LEFT_OUT.items() if given.get(name)),
    )
    if not _is_inside(folder, project.source):
        raise BadInput(f"{CONFIG}: {reference} is not a file of the project", param="run")
    return project


def _mapping(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = given.get(name) or {}
    if not isinstance(found, dict):
        raise BadInput(f"`{name}` of {CONFIG} must be a mapping", param=name)
    return found


def _check_system_packages(build: Mapping[str, Any], packages: Path) -> None:
    """Raise Unsupported for packages that are not installed on this machine, whose system folders predictors see."""
    listed = build.get("system_packages") or []
    names = [str(each).partition("=")[0].strip() for each in (listed if isinstance(listed, list) else [listed])]
    if missing := [name for name in names if not _is_installed(packages, name)]:
        shown = " ".join(missing)[:200]
        raise Unsupported(
            f"`build.system_packages` names packages that this machine does not have: {shown}. Install them "
            f"(`apt-get install {shown}`) and push again, or build the image elsewhere (`emberline push --image`)",
            param="build.system_packages",
        )


def _is_installed(packages: Path, name: str) -> bool:
    """True if a package is installed: then there is a list of its files, whose name may end with the processor's."""
    known = _PACKAGE.fullmatch(name) is not None
    return known and ((packages / f"{name}.list").exists() or any(packages.glob(f"{name}:*.list")))


def _python(build: Mapping[str, Any]) -> str:
    version = build.get("python_version")
    if version is None:
        return ""
    if isinstance(version, float):  # YAML reads 3.10 without quotes as the number 3.1
        version = "3.10" if version == 3.1 else str(version)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise BadInput(f'`build.python_version` must be text such as "3.12", not {version!r}', param="python_version")
    minor = int(version.split(".")[1])
    if minor < OLDEST_MINOR:
        raise Unsupported(
            f"Cog's server needs Python 3.{OLDEST_MINOR} or newer, not {version}: set `build.python_version`, and "
            "versions of the requirements that have wheels for it",
            param="python_version",
        )
    return f"3.{minor}"


def _requirements(folder: Path, build: Mapping[str, Any]) -> tuple[str, ...]:
    """Requirements of the project, in its order. Raises BadInput for anything but a name and versions."""
    lines: list[str] = []
    if (name := build.get("python_requirements")) is not None:
        path = folder / str(name)
        if not _is_inside(folder, path):
            raise BadInput(f"`build.python_requirements`: {name} is not a file of the project")
        lines += path.read_text(encoding="utf-8", errors="replace")[:MAX_CONFIG_BYTES].splitlines()
    packages = build.get("python_packages") or []
    lines += [str(each) for each in packages] if isinstance(packages, list) else []
    found = []
    for line in lines:
        requirement = line.partition(" #")[0].strip()
        if not requirement or requirement.startswith("#"):
            continue
        if not _REQUIREMENT.fullmatch(requirement):
            raise Unsupported(
                f"the requirement {requirement[:200]!r} is not a package's name and versions: addresses, paths and "
                "options of pip are not followed. Remove the line, or name a package of this server's index",
                param="python_requirements",
            )
        found.append(requirement)
    return tuple(found)


def _concurrency(given: Mapping[str, Any]) -> int:
    most = _mapping(given, "concurrency").get("max", 0)
    if type(most) is not int or not 0 <= most <= 256:
        raise BadInput("`concurrency.max` must be from 1 to 256", param="concurrency.max")
    return most


def _weights(folder: Path, given: Mapping[str, Any]) -> tuple[Weights, ...]:
    listed = given.get("weights") or []
    if not isinstance(listed, list):
        raise BadInput("`weights` must be a list", param="weights")
    found = []
    for number, each in enumerate(listed):
        fields = each if isinstance(each, dict) else {}
        source = fields.get("source")
        source = source if isinstance(source, dict) else {"uri": source}
        name, uri, target = str(fields.get("name") or number), source.get("uri"), fields.get("target")
        if not isinstance(uri, str) or not isinstance(target, str):
            raise BadInput(f"`weights` {name}: `source.uri` and `target` are needed", param="weights")
        if not target.startswith("/") or ".." in target.split("/") or target.rstrip("/") in ("", "/src"):
            raise BadInput(f"`weights` {name}: the target {target[:100]!r} must be a folder such as /src/weights")
        include, exclude = (tuple(map(str, source.get(key) or ())) for key in ("include", "exclude"))
        if uri.startswith("hf://"):
            if (matched := _HUB.fullmatch(uri)) is None or ".." in uri:
                raise BadInput(f"`weights` {name}: {uri[:200]} is not hf://ORG/NAME", param="weights")
            repository, revision = matched[1], matched[2] or ""
            own = Weights(name=name, target=target, repository=repository, revision=revision)
            found.append(msgspec.structs.replace(own, include=include, exclude=exclude))
            continue
        path = uri.removeprefix("file://")
        if "://" in path or not (folder / path).resolve().is_relative_to(folder.resolve()):
            raise Unsupported(f"`weights` {name}: {uri[:200]} is neither in the project nor hf://", param="weights")
        found.append(Weights(name=name, target=target, path=path))
    return tuple(found)


def _environment(given: Mapping[str, Any]) -> dict[str, str]:
    lines = given.get("environment") or []
    if not isinstance(lines, list):
        raise BadInput("`environment` must be a list of NAME=VALUE", param="environment")
    found = {}
    for line in lines:
        name, equals, value = str(line).partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\0" in value:
            raise BadInput(f"`environment`: {str(line)[:100]!r} is not NAME=VALUE", param="environment")
        if name.startswith(("LD_", "PYTHON", "COG_")) or name in ("PATH", "HOME", "PORT"):
            raise BadInput(f"`environment`: {name} is set by the server", param="environment")
        found[name] = value
    return found


def _is_inside(folder: Path, path: Path) -> bool:
    """True if the path is a file of the folder, symbolic links resolved."""
    return path.is_file() and path.resolve().is_relative_to(folder.resolve())
