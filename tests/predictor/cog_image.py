"""An image as `cog build` makes it, out of this machine's own files: nothing is downloaded for it.

Podman keeps it in a folder of the tests' own, with runc where it is installed: crun refuses machines that have control
groups of both versions.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import msgspec

from emberline.predictor.environments import Environment
from emberline.predictor.schema import openapi, read_signature
from emberline.supervisor.sandbox.containers import Engine

_LEFT_OUT = ("site-packages", "test", "tests", "idlelib", "ensurepip", "__pycache__", "include")
_BINARIES = ("/bin/sh", "/usr/bin/env")


def use_own_storage(folder: Path) -> dict[str, str]:
    """Variables by which Podman keeps everything in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    runtime = f'runtime = "{found}"\n' if (found := shutil.which("runc")) else ""
    storage = f'driver = "overlay"\ngraphroot = "{folder}/images"\nrunroot = "{folder}/run"\n'
    (folder / "storage.conf").write_text(f"[storage]\n{storage}")
    (folder / "containers.conf").write_text(f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\n{runtime}')
    return {
        "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
    }


def build_image(engine: Engine, name: str, folder: Path, environment: Environment) -> None:
    """Import an image with the project in `folder`, Cog's server, an interpreter and the C libraries that they need."""
    source = folder / "run.py"
    signature = read_signature(source.read_bytes(), "run.py:Runner")
    labels = {
        "run.cog.config": json.dumps({"build": {"python_version": "3.11"}, "predict": "run.py:Runner"}),
        "run.cog.openapi_schema": msgspec.json.encode(openapi(signature)).decode(),
        "run.cog.version": "0.23.1",
    }
    lines = ["FROM scratch", "ADD root.tar /", "WORKDIR /src", 'CMD ["python", "-m", "cog.server.http"]']
    lines += [
        "ENV COG_PREDICT_TYPE_STUB=run.py:Runner",
        f"ENV PATH={Path(environment.interpreter).parent}:/usr/bin:/bin",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "root"
        for place in ("tmp", "proc", "dev", "sys", "etc", "run", "src/.cog"):
            (root / place).mkdir(parents=True)
        shutil.copyfile(source, root / "src" / "run.py")
        (root / "src/.cog/openapi_schema.json").write_text(labels["run.cog.openapi_schema"])
        for path in environment.folders:
            shutil.copytree(path, root / path[1:], symlinks=True, ignore=_ignore)
        for binary in _BINARIES:
            _copy(binary, root)
        for program in [*_BINARIES, *_native(root)]:
            for library in re.findall(r"(/\S+) \(0x", _loads(program)):
                if not (root / library[1:]).exists():
                    _copy(library, root)
        for inner in root.rglob("*"):
            if inner.is_dir() and not inner.is_symlink():
                inner.chmod(0o755)
        (root / "tmp").chmod(0o1777)
        archive = Path(scratch) / "root.tar"
        with tarfile.open(archive, "w") as packed:
            packed.add(root, ".", filter=_owned_by_root)
        shutil.rmtree(root)
        (Path(scratch) / "Dockerfile").write_text("\n".join(lines) + "\n")
        command = [engine.path, "build", *(part for each in labels.items() for part in ("--label", "=".join(each)))]
        subprocess.run([*command, "--tag", name, scratch], check=True, capture_output=True)


def _ignore(folder: str, names: list[str]) -> list[str]:
    # Packages of the environment itself stay: those of the interpreter do not.
    is_base = folder.startswith(sys.base_prefix)
    return [each for each in names if is_base and each in _LEFT_OUT] + [each for each in names if each.endswith(".a")]


def _native(root: Path) -> list[str]:
    found = [str(path) for path in root.rglob("*.so*") if path.is_file()]
    return [*found, *(str(path) for path in root.rglob("bin/python3.*") if path.is_file() and os.access(path, os.X_OK))]


def _loads(program: str) -> str:
    return subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout


def _copy(path: str, root: Path) -> None:
    target = root / path[1:]
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def _owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member
