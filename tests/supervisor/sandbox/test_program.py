"""The escape suite: a hostile program in each kind of sandbox that this machine has, and what the launcher refuses."""

import json
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberline.protocol.errors import Unavailable
from emberline.supervisor.sandbox.program import Program, RunningProgram, Sandbox
from emberline.supervisor.sandbox.protections import Protections, find_protections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux's")

MIB = 1 << 20
LIMIT_S = 60.0
N_PROCESSES = 40
INTERPRETER = shutil.which("python3", path="/usr/bin:/bin") or os.path.realpath(sys.executable)


@pytest.fixture(scope="module")
def found() -> Protections:
    return find_protections()


@pytest.fixture(params=["bubblewrap", "landlock"])
def sandbox(request: pytest.FixtureRequest, found: Protections) -> Sandbox:
    """The sandbox of this machine, and that of one without bubblewrap."""
    if request.param == "bubblewrap":
        if not found.bubblewrap:
            pytest.skip(f"needs bubblewrap: {found.bubblewrap_problem}")
        return Sandbox(found)
    weaker = Protections(
        bubblewrap_problem="not here", hierarchy=found.hierarchy, landlock=found.landlock, seccomp=found.seccomp
    )
    if weaker.refusal(insists=False):
        pytest.skip("needs Landlock and seccomp")
    return Sandbox(weaker)


class Outside:
    """What a program would find outside: files, sockets, a process with a secret."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self.secret = folder / "secret"
        self.secret.write_text("the operator's secret")
        self.secret.chmod(0o644)
        self.socket_path = str(folder / "socket")
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.udp.setblocking(False)
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(self.socket_path)
        self.unix.listen()
        self.abstract = f"emberline-test-{os.getpid()}"
        self.abstract_socket = socket.socket(socket.AF_UNIX)
        self.abstract_socket.bind(f"\0{self.abstract}")
        self.abstract_socket.listen()

    @property
    def attempts(self) -> list[tuple[str, str]]:
        tcp, udp, pid = str(self.tcp.getsockname()[1]), str(self.udp.getsockname()[1]), str(os.getpid())
        paths = ("/usr/bin/new", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/dev/new", "/new", str(self.secret))
        return [
            *(("read", path) for path in (str(self.secret), "/etc/shadow", "/dev/mem", "/proc/kcore")),
            ("list", str(self.secret.parent)),
            *(("write", path) for path in paths),
            *(("mode", path) for path in ("/dev/null", "/usr/bin", str(self.secret))),
            *(("remove", path) for path in ("/usr/bin/env", str(self.secret))),
            ("link", str(self.secret)),
            *(("tcp", tcp), ("tcp6", tcp), ("raw", ""), ("internet", ""), ("unix", self.socket_path)),
            *(("abstract", self.abstract), ("netlink", ""), ("packet", ""), ("vsock", "")),
            *(("memory_of", pid), ("environment_of", pid), ("trace", pid), ("signal", pid)),
            *(("environment", name) for name in ("EMBERLINE_SECRET", "EMBERLINE_API_KEY")),
            *((name, "") for name in ("mount", "unshare_users", "unshare_network", "chroot", "root", "host_name")),
            *((name, "") for name in ("groups", "device")),
            *((name, "") for name in X86_CALLS if platform.machine() == "x86_64"),
            ("udp", udp),
        ]

    @property
    def has_datagram(self) -> bool:
        try:
            return bool(self.udp.recv(1))
        except BlockingIOError:
            return False

    def close(self) -> None:
        for each in (self.tcp, self.udp, self.unix, self.abstract_socket):
            each.close()


X86_CALLS = ("bpf", "keys", "io_uring", "userfaultfd", "open_by_handle")


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    monkeypatch.setenv("EMBERLINE_SECRET", "s" * 32)
    monkeypatch.setenv("EMBERLINE_API_KEY", "k" * 32)
    outside = Outside(tmp_path)
    yield outside
    outside.close()


def program(folder: Path, *attempts: tuple[str, str], memory_bytes: int = 128 * MIB) -> Program:
    """The hostile program. `folder` gets a copy that every user may read."""
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    script = folder / "escapes.py"
    script.write_bytes((Path(__file__).parent / "escapes.py").read_bytes())
    script.chmod(0o644)
    arguments = [word for attempt in attempts for word in attempt]
    prefix = os.path.realpath(sys.base_prefix)
    return Program(
        command=(INTERPRETER, "-I", str(script), *arguments),
        environment={"HOME": "/tmp", "PATH": "/usr/bin:/bin"},
        folder="/tmp",
        readable=[(str(folder), str(folder)), (prefix, prefix)],
        memory_bytes=memory_bytes,
        scratch_bytes=32 * MIB,
        cpus=2.0,
        n_processes=N_PROCESSES,
    )


def run(sandbox: Sandbox, hostile: Program, output: Path) -> tuple[RunningProgram, str]:
    """Run a program to its end. Returns it, not killed yet, and its output."""
    with output.open("wb") as file:
        running = sandbox.start(hostile, file.fileno())
    try:
        assert running.wait(LIMIT_S), "it hangs"
    finally:
        if running.status is None:
            running.kill()
    return running, output.read_text()


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that other users can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="emberline-test-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_program_does_not_get_out(sandbox: Sandbox, outside: Outside, place: Path, tmp_path: Path) -> None:
    hostile = program(place / "program", *outside.attempts, ("scratch", ""), ("descriptors", ""))
    running, output = run(sandbox, hostile, tmp_path / "output")
    running.kill()
    outcomes = json.loads(output.splitlines()[-1])
    assert outcomes.pop("scratch ") == "done"
    assert outcomes.pop("descriptors ") == "[]"
    outcomes.pop(f"udp {outside.udp.getsockname()[1]}")
    reached = {attempt: outcome for attempt, outcome in outcomes.items() if not outcome.startswith("refused:")}
    assert not reached
    assert not outside.has_datagram
    assert outside.secret.read_text() == "the operator's secret"
    assert outside.secret.stat().st_mode & 0o777 == 0o644


def test_a_program_is_bounded_in_processes_and_space(sandbox: Sandbox, place: Path, tmp_path: Path) -> None:
    hostile = program(place / "program", ("fill", ""), ("fork", ""))
    running, output = run(sandbox, hostile, tmp_path / "output")
    running.kill()
    outcomes = json.loads(output.splitlines()[-1])
    mib = int(outcomes["fill "].split()[-2])
    assert mib <= 32, outcomes
    if sandbox.protections.hierarchy is not None:
        assert int(outcomes["fork "]) < N_PROCESSES, outcomes
    assert wait_until(lambda: not alive_in_group(running.pid)), "its children go on"


def test_a_program_that_takes_too_much_memory_is_ended(sandbox: Sandbox, place: Path, tmp_path: Path) -> None:
    running, output = run(
        sandbox, program(place / "program", ("allocate", ""), memory_bytes=64 * MIB), tmp_path / "output"
    )
    problem = running.problem
    running.kill()
    if sandbox.protections.bounds_memory:
        assert problem == "it used more than its 64 MiB of memory"
    else:
        assert "MemoryError" in output


def test_killing_a_program_ends_all_that_it_started(sandbox: Sandbox, place: Path, tmp_path: Path) -> None:
    hostile = program(place / "program")
    script = f"import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\ntime.sleep({LIMIT_S})"
    (place / "program" / "escapes.py").write_text(f"print('up', flush=True)\n{script}")
    with (tmp_path / "output").open("wb") as file:
        running = sandbox.start(hostile, file.fileno())
    while not (tmp_path / "output").read_text():
        assert running.status is None, running.problem
    running.kill()
    running.kill()
    assert running.status is not None
    marker = str(place).encode()
    assert wait_until(lambda: not any(marker in _bytes(each) for each in Path("/proc").glob("[0-9]*/cmdline")))


def test_scratch_space_that_is_full_is_seen(found: Protections, place: Path, tmp_path: Path) -> None:
    if not found.bubblewrap:
        pytest.skip(f"needs bubblewrap: {found.bubblewrap_problem}")
    hostile = program(place / "program")
    script = f"import time\nprint('up', flush=True)\ntime.sleep({LIMIT_S})"
    fill = "try:\n    open('/tmp/large', 'wb').write(bytes(64 << 20))\nexcept OSError: pass"
    for number, source in enumerate((script, f"{fill}\n{script}")):
        (place / "program" / "escapes.py").write_text(source)
        with (tmp_path / f"output-{number}").open("wb") as file:
            running = Sandbox(found).start(hostile, file.fileno())
        try:
            while not (tmp_path / f"output-{number}").read_text():
                assert running.status is None, running.problem
                time.sleep(0.01)
            assert running.scratch_is_full is bool(number)
        finally:
            running.kill()


def wait_until(holds: Callable[[], bool]) -> bool:
    """Wait for a condition. Returns False after LIMIT_S."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def alive_in_group(group: int) -> list[bytes]:
    """The processes of a group that are not zombies."""
    fields = [_bytes(each).rpartition(b")")[2].split() for each in Path("/proc").glob("[0-9]*/stat")]
    return [each[0] for each in fields if len(each) > 2 and each[2] == str(group).encode() and each[0] != b"Z"]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_nothing_runs_bare_unless_the_operator_insists(place: Path, tmp_path: Path) -> None:
    bare = Protections(bubblewrap_problem="not installed")
    hostile = program(place / "program", ("scratch", ""))
    with (tmp_path / "output").open("wb") as file:
        with pytest.raises(Unavailable, match=r"cannot keep foreign code in: it lacks bubblewrap \(not installed\)"):
            Sandbox(bare).start(hostile, file.fileno())
        running = Sandbox(bare, insists=True).start(hostile, file.fileno())
    assert running.wait(LIMIT_S)
    running.kill()
    assert json.loads((tmp_path / "output").read_text()) == {"scratch ": "done"}


def test_a_machine_says_what_it_lacks() -> None:
    lacking = Protections(bubblewrap_problem="not installed", landlock=2, seccomp=True).missing
    assert [each.split(" ")[0] for each in lacking] == ["bubblewrap", "Landlock", "control"]
    assert find_protections(path="/nowhere").bubblewrap_problem.startswith("not installed: apt-get install")
