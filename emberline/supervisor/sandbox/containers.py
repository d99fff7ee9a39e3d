"""Containers as sandboxes: images that were made elsewhere, run by Docker or Podman on this machine.

A container has no network, a read-only root, scratch space of bounded size, limits on memory, CPU and processes, no
capabilities and the engine's seccomp profile. The engine pulls nothing when it starts one. `relay.py`, which runs in
the container, gets the listening socket over a Unix socket that is mounted there; the container ends when this process
closes it.
"""

import contextlib
import itertools
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from emberline.protocol.errors import BadInput, Unavailable
from emberline.protocol.sizes import format_limit
from emberline.supervisor.sandbox.control_group import ROOT, MemoryCounters
from emberline.supervisor.sandbox.enter import NOBODY
from emberline.supervisor.sandbox.program import SCRATCH, Program, Running, is_full_inside

ENGINES = ("podman", "docker")
PROBE_S, CONTROL_S, PULL_S = 20.0, 30.0, 3600.0
END_S = 5.0  # for the engine's command to see that its container was removed
PREFIX = "emberline-predictor"
# Processes of the containers' user on this machine. An engine's own default may be more than it may set; the bound of
# one container is its pids limit.
ALL_PROCESSES = 32_768
FOLDER = "/run/emberline"  # of the relay and its control socket, in the container
RELAY, CONTROL = f"{FOLDER}/relay.py", f"{FOLDER}/control"
_ENGINE_ERRORS = (125, 126, 127)  # exit statuses of a container that the engine could not start
# Variables that an engine's command line needs; it gets no others of this process.
_INHERITED = ("PATH", "HOME", "XDG_RUNTIME_DIR", "TMPDIR")
_INHERITED_PREFIXES = ("DOCKER_", "CONTAINERS_", "CONTAINER_")
_numbers = itertools.count()


class Engine(msgspec.Struct, frozen=True):
    """A container engine that answers."""

    kind: str  # "podman" or "docker"
    path: str

    def ask(self, *arguments: str, limit_s: float = CONTROL_S) -> "subprocess.CompletedProcess[str]":
        """Run a command of the engine. Raises Unavailable if it does not end in time."""
        try:
            return subprocess.run(
                [self.path, *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
                env=_engine_environment(),
            )
        except subprocess.TimeoutExpired:
            raise Unavailable(f"{self.kind} {arguments[0]} did not end within {limit_s:g} s") from None
        except OSError as error:
            raise Unavailable(f"{self.kind} cannot be started: {error.strerror}") from None


class ImageConfig(msgspec.Struct):
    """The part of an image's configuration that matters here."""

    Labels: dict[str, str] | None = None
    Env: list[str] | None = None
    Cmd: list[str] | None = None
    Volumes: dict[str, Any] | None = None


class Image(msgspec.Struct):
    """An image that an engine has."""

    Id: str
    Config: ImageConfig
    Size: int = 0

    @property
    def digest(self) -> str:
        """The id of the image, which names its contents: `sha256:…`."""
        return self.Id if self.Id.startswith("sha256:") else f"sha256:{self.Id}"


_images = msgspec.json.Decoder(list[Image])


def find_engines(path: str | None = None) -> tuple[list[Engine], str]:
    """The container engines of this machine that answer, and what is wrong with the others. Blocks for up to a second.

    `path`: where to look; None: in PATH."""
    found, problems = [], []
    for kind in ENGINES:
        if (program := shutil.which(kind, path=path)) is None:
            problems.append(f"{kind} is not installed")
            continue
        engine = Engine(kind, program)
        try:
            problem = _problem(engine)
        except Unavailable as error:
            problem = error.message
        if problem:
            problems.append(problem)
        else:
            found.append(engine)
    return found, "; ".join(problems)


def _problem(engine: Engine) -> str:
    """Why the engine cannot be used; empty if it can. Raises Unavailable."""
    what = "{{.Client.Version}}"
    if engine.kind == "docker":
        what = "{{.Server.Version}}"
        # The context is that of DOCKER_HOST, else of DOCKER_CONTEXT, else the one that `docker context use` chose.
        context = engine.ask("context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        if context.returncode:
            return f"docker's context cannot be read: {_last_line(context.stderr)}"
        if not (host := context.stdout.strip()).startswith("unix:"):
            return f"docker's context is {host}, another machine, whose containers cannot share files with this one"
    asked = engine.ask("version", "--format", what, limit_s=PROBE_S)
    return f"{engine.kind} does not answer: {_last_line(asked.stderr)}" if asked.returncode else ""


def find_engine(kind: str = "") -> Engine:
    """The engine of that kind; empty: any. Raises Unavailable, which says what is missing."""
    engines, problem = find_engines()
    for engine in engines:
        if kind in ("", engine.kind):
            return engine
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        problem += ". In a Kubernetes pod no engine can be reached: push the project's folder instead"
    raise Unavailable(f"no container engine runs here ({problem}); images need Docker or Podman on this machine")


def find_image(reference: str, registries: Sequence[str] = ()) -> tuple[Engine, Image]:
    """The image, and the engine that has it. It is pulled if it is in one of these registries.

    Raises BadInput for an image that is not here and may not be pulled."""
    if not reference or reference.startswith("-") or not reference.isprintable() or " " in reference:
        raise BadInput(f"{reference[:200]!r} is not the name of an image", param="image")
    find_engine()
    engines, _ = find_engines()
    for engine in engines:
        if (image := _inspect(engine, reference)) is not None:
            return engine, image
    if not is_granted(reference, registries):
        raise BadInput(
            f"there is no image {reference[:200]} in {' or '.join(each.kind for each in engines)}, and its registry is "
            "not granted: pull it yourself, or list the registry in [predictors] image_registries",
            param="image",
        )
    full = full_name(reference)
    pulled = engines[0].ask("pull", "--quiet", full, limit_s=PULL_S)
    if pulled.returncode or (image := _inspect(engines[0], full)) is None:
        raise Unavailable(f"{reference[:200]} cannot be pulled: {_last_line(pulled.stderr)}")
    return engines[0], image


def is_granted(reference: str, registries: Sequence[str]) -> bool:
    """True if the image is in one of the registries, or in a repository below it ("ghcr.io/me")."""
    parts = full_name(reference).split("/")
    granted = [each.rstrip("/").split("/") for each in registries]
    return any(len(each) < len(parts) and parts[: len(each)] == each for each in granted)


def full_name(reference: str) -> str:
    """The reference with its registry, Docker Hub if it names none: Podman may look for a short name elsewhere."""
    first, slash, _ = reference.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return reference
    return f"docker.io/{reference if slash else f'library/{reference}'}"


def _inspect(engine: Engine, reference: str) -> Image | None:
    asked = engine.ask("image", "inspect", reference)
    if asked.returncode:
        return None
    try:
        (image,) = _images.decode(asked.stdout)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Unavailable(f"{engine.kind} describes {reference[:200]} in a way that cannot be read: {error}") from None
    return image


class RunningContainer(Running):
    """A container that was started. `kill` it in any case, also after it has ended.

    It has the methods of a `RunningProgram`."""

    def __init__(
        self, engine: Engine, image: str, program: Program, relay: Path, runtime: Path, listener: int, output: int
    ) -> None:
        """Start a container of the image. It gets the descriptor `listener`, through a socket in the folder `runtime`,
        and writes to `output`."""
        remove_abandoned(engine)
        self._engine = engine
        self._memory_limit = program.memory_bytes
        self._name = f"{_own_prefix()}{os.getpid()}-{next(_numbers)}"
        mounts = [(str(relay), RELAY), (str(runtime / "control"), CONTROL)]
        arguments, variables = run_arguments(engine.kind, self._name, image, program, mounts)
        self._lifeline: socket.socket | None = None
        self._counters: MemoryCounters | None = None
        self._known_pid = ""
        self._is_removed = False
        self._control = socket.socket(socket.AF_UNIX)
        self._control.bind(str(runtime / "control"))
        os.chmod(runtime / "control", 0o666)  # the container's user is nobody
        self._control.listen(1)
        descriptor = os.dup(listener)
        threading.Thread(target=self._hand_over, args=(descriptor,), name="container", daemon=True).start()
        try:
            self._process = subprocess.Popen(
                [engine.path, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=variables,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise Unavailable(f"{engine.kind} cannot be started: {error.strerror}") from None

    def _hand_over(self, descriptor: int) -> None:
        """Give the relay the listening socket, and keep the connection: the container ends with it."""
        try:
            with self._control:
                connection, _ = self._control.accept()
            self._lifeline = connection
            socket.send_fds(connection, [b"x"], [descriptor])
        except OSError:
            return  # the container ended before
        finally:
            os.close(descriptor)

    @property
    def memory_bytes(self) -> int:
        """Memory that the container uses, scratch files included; 0: not known."""
        counters = self._find_counters()
        return 0 if counters is None else counters.memory_bytes

    @property
    def scratch_is_full(self) -> bool:
        """True if the container has no scratch space left. False if that is not known."""
        return is_full_inside(self._first_pid())

    @property
    def problem(self) -> str:
        """Why it ended, as far as the engine knows; empty if its log says it."""
        counters = self._find_counters()
        if (counters is not None and counters.n_out_of_memory) or self._state("OOMKilled") == "true":
            return f"it used more than its {format_limit(self._memory_limit)} of memory"
        status = self.status
        if not status or status in _ENGINE_ERRORS:
            return ""
        return f"it ended with status {status}"

    def _find_counters(self) -> MemoryCounters | None:
        if self._counters is None and (pid := self._first_pid()):
            self._counters = MemoryCounters.of_process(int(pid), ROOT)
        return self._counters

    def _first_pid(self) -> str:
        """The id, on this machine, of the container's first process; empty while the engine knows none."""
        if not self._known_pid and (pid := self._state("Pid")).isdigit() and pid != "0":
            self._known_pid = pid
        return self._known_pid

    def _state(self, field: str) -> str:
        if self._is_removed:
            return ""
        with contextlib.suppress(Unavailable):
            return self._engine.ask("inspect", "--format", f"{{{{.State.{field}}}}}", self._name).stdout.strip()
        return ""

    def terminate(self) -> None:
        """Ask it to end."""
        with contextlib.suppress(Unavailable):
            self._engine.ask("kill", "--signal", "TERM", self._name)

    def kill(self) -> None:
        """End and remove the container. Idempotent."""
        if self._is_removed:
            return
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for the relay
        if self._lifeline is not None:
            self._lifeline.close()
        with contextlib.suppress(Unavailable):
            self._engine.ask("rm", "--force", "--volumes", self._name)
        self._is_removed = True
        if not self.wait(END_S):
            self._process.kill()
            self._process.wait()


def run_arguments(
    kind: str, name: str, image: str, program: Program, mounts: Sequence[tuple[str, str]]
) -> tuple[list[str], dict[str, str]]:
    """Arguments of the engine's command line, and its variables. Values of the program's variables are not among the
    arguments, which every user of the machine can read.

    Raises BadInput for a variable that would steer the engine itself."""
    memory = program.memory_bytes + program.scratch_bytes  # files in memory count
    arguments = ["run", "--name", name, "--pull", "never", "--network", "none", "--hostname", "sandbox"]
    arguments += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    arguments += ["--user", f"{NOBODY}:{NOBODY}", "--log-driver", "none"]
    arguments += ["--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(program.n_processes)]
    arguments += ["--cpus", f"{min(program.cpus, os.cpu_count() or 1):g}", "--shm-size", str(program.scratch_bytes)]
    scratch = f"{SCRATCH}:rw,exec,nosuid,nodev,mode=1777,size={program.scratch_bytes}"
    for limit, most in (("nofile", program.n_files), ("nproc", ALL_PROCESSES), ("core", 0)):
        arguments += ["--ulimit", f"{limit}={most}:{most}"]
    if kind == "podman":  # it would add folders that can be written, and copy the image's files into ours
        arguments += ["--read-only-tmpfs=false", "--tmpfs", f"{scratch},notmpcopyup"]
    else:
        arguments += ["--tmpfs", scratch]
    for path, place in (*mounts, *program.readable):
        arguments += ["--mount", f"type=bind,source={path},target={place},readonly"]
    if program.gpus:
        devices = ",".join(program.gpus)
        arguments += (
            ["--gpus", f'"device={devices}"']
            if kind == "docker"
            else [part for each in program.gpus for part in ("--device", f"nvidia.com/gpu={each}")]
        )
    own = _engine_environment()
    for variable, value in program.environment.items():
        if variable.startswith(_INHERITED_PREFIXES):
            raise BadInput(f"{variable} is a variable of the container engine: give the secret another name")
        arguments += ["--env", f"{variable}={value}" if variable in own or not value else variable]
    return [*arguments, image, *program.command], {**program.environment, **own}


def remove_abandoned(engine: Engine) -> None:
    """Remove the containers of processes that were killed before they could do so themselves."""
    with contextlib.suppress(Unavailable):
        listed = engine.ask("ps", "--all", "--filter", f"name={_own_prefix()}", "--format", "{{.Names}}")
        for name in listed.stdout.split():
            owner = name.removeprefix(_own_prefix()).partition("-")[0]
            if owner.isdigit() and not Path("/proc", owner).exists():
                engine.ask("rm", "--force", "--volumes", name)


def _own_prefix() -> str:
    """The start of a container's name: process ids mean nothing to a server in another namespace of them."""
    return f"{PREFIX}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _engine_environment() -> dict[str, str]:
    environ: Mapping[str, Any] = os.environ
    return {
        name: value for name, value in environ.items() if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
    }


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1][-300:]
