"""Fixtures and settings that tests of several packages share."""

import atexit
import fcntl
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's threads contend for two cores with ours
if not Path("/dev/nvidiactl").exists():  # read when Triton is imported: before any kernel's module
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from tests.examples import EVERY_EXAMPLE, n_examples

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU host may have pytest and nothing more
    pass
else:  # the same examples every day, others in each `make test-all`; no clock: machines that run tests are busy
    no_clock = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    fresh = {"derandomize": not EVERY_EXAMPLE, "print_blob": EVERY_EXAMPLE}
    settings.register_profile("emberline", max_examples=n_examples(40), **fresh, **no_clock)
    settings.load_profile("emberline")

from emberline.catalog.model_store import ModelStore
from emberline.catalog.pull import pull
from tests.databases import DATABASE_KINDS, DatabaseLocation, database_location, postgres_server
from tests.triton_interpreter import speed_up

# Processes that tests start find `standins` and `tests` from any working directory.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
)
GPU_SHARE = 0.2  # of a GPU's memory, for each process of `make test-gpu`
pytest_plugins = ["tests.cpu_time", "tests.scheduling", "tests.skip_rules"]
SLOW_TIMEOUT_S = 600  # of a test marked `slow` or `gpu`, and of every test of `make test-all`

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # started in the background or by nohup; processes inherit it
        signal.signal(number, usual)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, which then never scans the modules and thousands of tests again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # native extensions report what is left at exit as a leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_slow = EVERY_EXAMPLE or item.get_closest_marker("slow") or item.get_closest_marker("gpu")
        if is_slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.fixture(autouse=True, scope="session")
def shared_tls_context() -> None:
    """Let the tests' HTTP clients share a TLS context: reading the certificates takes each of them 50 ms."""
    if transports := sys.modules.get("httpx._transports.default"):
        transports.create_ssl_context = cache(transports.create_ssl_context)


@pytest.fixture(autouse=True, scope="session")
def quick_triton_interpreter() -> None:
    """Make the interpreter of Triton quicker where tests have imported Triton; `make test-all` runs the plain one."""
    if not EVERY_EXAMPLE and "triton.runtime.interpreter" in sys.modules:
        speed_up()


@pytest.fixture(autouse=True)
def usual_signal_handlers() -> Iterator[None]:
    """Fail a test that leaves a signal handler behind: it would take the signals of later tests of the process."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]  # a server of the module may have its own
    yield
    after = [signal.getsignal(number) for number in numbers]
    if after != before:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        pytest.fail(f"left behind: {after}, before: {before}")


@pytest.fixture(autouse=True)
def gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests on a GPU share it: one that takes more than its part fails by itself, and none keeps what it took."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    import torch

    torch.cuda.set_per_process_memory_fraction(GPU_SHARE)
    yield
    gc.collect()
    torch.cuda.empty_cache()


def pulled(model: str) -> Path:
    """A model's files, pulled once per machine: test processes share the download."""
    cache = Path(os.environ.get("EMBERLINE_TEST_CACHE") or "~/.cache/emberline-tests").expanduser()
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "pull.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return pull(model, ModelStore(cache)).path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's GGUF."""
    return pulled("smollm2")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a two-layer model with a byte tokenizer."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server, one for the whole run."""
    with postgres_server() as url:
        yield url


@pytest.fixture(params=DATABASE_KINDS)
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[DatabaseLocation]:
    """An empty place on each of the databases in turn."""
    server = request.getfixturevalue("postgres") if request.param == "postgres" else None
    async with database_location(request.param, tmp_path, server) as place:
        yield place
