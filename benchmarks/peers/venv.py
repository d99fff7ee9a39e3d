"""Environments of the peers: one folder each, named after its pins, filled by pip."""

import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.contender import Setup


class SetupFailed(RuntimeError):
    """A peer could not be set up; the message says which step failed and where its log is."""


def ensure_venv(setup: Setup, name: str, pins: Sequence[str], drop: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment that holds `pins` and, after that, not `drop`."""
    folder = setup.cache / f"venv-{name}"
    python = folder / "bin" / "python"
    stamp = folder / "pins.txt"
    wanted = "\n".join(pins)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    setup.say(f"setting up {name}: pip install {' '.join(pins)}")
    venv.create(folder, with_pip=True, clear=True)
    log = setup.cache / f"venv-{name}.log"
    run([str(python), "-m", "pip", "install", *pins], log)
    if drop:
        run([str(python), "-m", "pip", "uninstall", "-y", *drop], log)
    stamp.write_text(wanted)
    return python


def run(command: Sequence[str], log: Path, cwd: Path | None = None) -> str:
    """Runs a set-up step to its end; what it prints goes to the end of `log` as it comes, and is returned."""
    with log.open("a+") as sink:
        sink.write(f"$ {' '.join(command)}\n")
        sink.flush()
        began = sink.tell()
        status = subprocess.run(command, cwd=cwd, stdout=sink, stderr=subprocess.STDOUT, check=False).returncode
        sink.seek(began)
        said = sink.read()
    if status != 0:
        tail = "\n".join(said.splitlines()[-15:])
        raise SetupFailed(f"{' '.join(command)} ended with status {status} (log: {log})\n{tail}")
    return said
