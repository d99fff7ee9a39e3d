"""The Vercel AI SDK in a Node process of its own, driven by one line of JSON per task (drive.mjs)."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INSTALL_S = 100
_INSTALL = ("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error")


class Missing(Exception):
    """The packages cannot be had; the message says why."""


class Failed(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.name: str = error["name"]
        self.status: int | None = error["status"]


class Sdk:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, task: str, url: str, prompt: str, **options: Any) -> dict[str, Any]:
        """What the task returned; Failed if it threw."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"task": task, "url": url, "prompt": prompt, **options}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "node ended; what it said is above"
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result


@contextlib.contextmanager
def driven(cache: Path) -> Iterator[Sdk]:
    folder = installed(HERE, cache)
    shutil.copy(HERE / "drive.mjs", folder)  # node resolves modules from the folder of the script
    environment = {**os.environ, "AI_SDK_LOG_WARNINGS": "false", "NODE_NO_WARNINGS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(["node", "drive.mjs"], cwd=folder, env=environment, text=True, **pipes) as process:
        try:
            yield Sdk(process)
        finally:
            process.kill()


def installed(package: Path, cache: Path) -> Path:
    """A folder with the packages that `package`'s lock names, installed if they are not there yet."""
    if missing := [tool for tool in ("node", "npm") if shutil.which(tool) is None]:
        raise Missing(f"{' and '.join(missing)} not found: the JavaScript clients need Node.js 20 or newer")
    lock = (package / "package-lock.json").read_bytes()
    folder = cache / f"{package.name}-{sha256(lock).hexdigest()[:12]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as half:
            _install(package, Path(half) / "whole")
            with contextlib.suppress(OSError):  # another run was faster
                (Path(half) / "whole").rename(folder)
    return folder


def _install(package: Path, folder: Path) -> None:
    folder.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(package / name, folder)
    install = subprocess.run(_INSTALL, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if install.returncode:
        raise Missing(f"npm could not install the JavaScript clients: {install.stderr.strip()[-600:]}")
