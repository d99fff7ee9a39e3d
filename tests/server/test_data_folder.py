"""One data folder serves one server at a time, and is free again however that one ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from emberline.protocol.errors import Conflict
from emberline.server.data_folder import LOCK, locked
from tests.cli.console import emberline

HOLD = """
import sys
from pathlib import Path
from emberline.server.data_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_server_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"held\n"
        refused = rf"a server \(process {first.pid}\) uses the data folder .*--data-dir"
        with pytest.raises(Conflict, match=refused), locked(tmp_path):
            pass
        done = emberline("serve", "--port", "0", home=tmp_path)
        assert done.returncode == 1
        assert f"emberline: a server (process {first.pid}) uses the data folder" in done.stderr
        # Commands on the store need no server, and ask for no lock.
        assert emberline("key", "create", "--account", "acme", home=tmp_path).returncode == 0
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_folder_is_made_and_freed(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    for _ in range(2):
        with locked(home):
            assert home.stat().st_mode & 0o777 == 0o700
