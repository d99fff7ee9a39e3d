"""Grammars from the child process: cached, shared, limited in time, and outliving a child that dies."""

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from typing import Any

import pytest

from emberline.protocol.errors import BadInput, Internal, Overloaded
from emberline.protocol.grammar import decode
from emberline.protocol.request import OutputFormat
from emberline.text.grammar import compiler_pool as turns
from emberline.text.grammar.compiler_pool import GrammarCompiler, _encode
from emberline.text.grammar.reply_grammar import GrammarSpec
from tests.soak.server_process import children
from tests.text.grammar.reference import matches


def spec(kind: Any, value: Any = None) -> GrammarSpec:
    return GrammarSpec(output=OutputFormat(kind, value))


@pytest.fixture
async def compiler() -> Any:
    compiler = GrammarCompiler(limit_s=60.0)
    yield compiler
    await compiler.close()


async def test_every_kind_of_output(compiler: GrammarCompiler) -> None:
    for each, good, bad in [
        (spec("json_object"), '{"a":1}', "[]"),
        (spec("json_schema", {"type": "integer"}), "12", "x"),
        (spec("regex", "a+b"), "aab", "b"),
        (spec("choice", ["yes", "no"]), "no", "maybe"),
        (spec("grammar", 'root ::= "x" root | "y"'), "xxy", "x"),
    ]:
        grammar = decode(await compiler.compile(each))
        assert matches(grammar, good)
        assert not matches(grammar, bad)


async def test_from_the_cache_within_a_millisecond(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string", "description": "x" * 50} for n in range(40)}}
    first = await compiler.compile(spec("json_schema", schema))
    took = []
    for _ in range(20):
        started_s = time.thread_time()
        assert await compiler.compile(spec("json_schema", dict(schema))) is first
        took.append(time.thread_time() - started_s)
    assert min(took) < 0.001


async def test_the_order_of_keys_is_kept(compiler: GrammarCompiler) -> None:
    for names in ("ba", "ab"):
        schema = {"properties": {name: {"type": "null"} for name in names}, "required": ["a", "b"], "type": "object"}
        grammar = decode(await compiler.compile(spec("json_schema", schema)))
        assert matches(grammar, "{" + ",".join(f'"{name}":null' for name in names) + "}")


async def test_one_process_is_started_early_and_used_first(compiler: GrammarCompiler) -> None:
    def processes() -> set[int]:
        return set(children(os.getpid(), ("emberline.text.grammar.compiler_process",)))

    before = processes()
    await compiler.start()
    started = processes() - before
    assert started == {compiler.child_pid}
    await compiler.compile(spec("regex", "x"))
    assert processes() - before == started
    await asyncio.gather(*(compiler.compile(spec("regex", letter)) for letter in "yz"))
    assert len(processes() - before) == 2


async def test_the_same_is_compiled_once(compiler: GrammarCompiler) -> None:
    results = await asyncio.gather(*(compiler.compile(spec("regex", "[a-z]{5}")) for _ in range(20)))
    assert all(result is results[0] for result in results)


async def test_errors_come_back_whole(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadInput, match="look-ahead") as caught:
        await compiler.compile(spec("regex", "(?=a)"))
    assert caught.value.param == "output"
    with pytest.raises(BadInput, match="contradict"):
        await compiler.compile(spec("json_schema", False))


async def test_concurrent_callers_get_separate_error_objects(compiler: GrammarCompiler) -> None:
    """API handlers change the error to name the field of their own request."""
    wrong = spec("regex", "(")
    first, second = await asyncio.gather(compiler.compile(wrong), compiler.compile(wrong), return_exceptions=True)
    assert isinstance(first, BadInput)
    assert isinstance(second, BadInput)
    assert first is not second
    assert (first.message, first.param) == (second.message, second.param)


async def test_an_error_names_what_demanded_the_grammar(compiler: GrammarCompiler) -> None:
    with pytest.raises(BadInput) as caught:
        await compiler.compile(spec("regex", "[]"))
    assert caught.value.param == "output"


async def test_a_slow_compilation_is_killed_and_others_continue() -> None:
    compiler = GrammarCompiler(limit_s=60.0)
    await compiler.compile(spec("regex", "x"))
    pid = compiler.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # it will never answer
    compiler.limit_s = 0.1
    slow = asyncio.create_task(compiler.compile(spec("regex", "y")))
    await settle()
    compiler.limit_s = 60.0
    other = asyncio.create_task(compiler.compile(spec("regex", "z")))
    with pytest.raises(BadInput, match=r"takes longer than 0\.1 s to compile: simplify"):
        await slow
    assert matches(decode(await other), "z")
    assert compiler.child_pid != pid
    await compiler.close()


async def test_a_child_that_dies_is_replaced(compiler: GrammarCompiler) -> None:
    await compiler.compile(spec("regex", "x"))
    pid = compiler.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert matches(decode(await compiler.compile(spec("regex", "y"))), "y")


async def test_a_child_that_has_ended_before_it_is_asked_is_replaced(compiler: GrammarCompiler) -> None:
    await compiler.compile(spec("regex", "x"))
    pid = compiler.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the event loop's own watcher has reaped it already
        os.waitid(os.P_PID, pid, os.WEXITED)
    # The child is reaped, and the compiler has not been told: nothing was awaited since.
    assert matches(decode(await compiler.compile(spec("regex", "y"))), "y")


async def test_a_format_that_kills_the_child_twice_is_refused() -> None:
    script = "import os; os.write(1, bytes(4)); os.read(0, 4)"  # ready, and gone at the first request
    compiler = GrammarCompiler(command=[sys.executable, "-c", script])
    with pytest.raises(BadInput, match="could not be compiled"):
        await compiler.compile(spec("regex", "x"))
    await compiler.close()


async def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(limit_s=60.0, cache_bytes=2000)
    for n in range(50):
        await compiler.compile(spec("choice", [f"option {n} " + "x" * 200]))
        assert compiler.held_bytes <= 2000
    await compiler.close()


async def test_closed_means_closed(compiler: GrammarCompiler) -> None:
    await compiler.close()
    with pytest.raises(Internal, match="closed"):
        await compiler.compile(spec("regex", "x"))


async def test_the_child_needs_no_torch(compiler: GrammarCompiler) -> None:
    unwanted = "'torch' in sys.modules or 'tokenizers' in sys.modules"
    code = f"import sys, emberline.text.grammar.compiler_process; sys.exit({unwanted})"
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await child.wait() == 0


async def test_a_waiting_caller_may_leave(compiler: GrammarCompiler) -> None:
    task = asyncio.create_task(compiler.compile(spec("regex", "abc")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert matches(decode(await compiler.compile(spec("regex", "abc"))), "abc")


# --- many at once -----------------------------------------------------------------------------------------------------

# Answers in its own time: as many milliseconds as the regex says.
SLEEPER = """
import os, sys, time, msgspec
from emberline.text.grammar.compiler_process import LENGTH, READY, CompileReply
from emberline.text.grammar.reply_grammar import GrammarSpec
sys.stdout.buffer.write(READY)
sys.stdout.buffer.flush()
while head := sys.stdin.buffer.read(LENGTH.size):
    spec = msgspec.msgpack.decode(sys.stdin.buffer.read(LENGTH.unpack(head)[0]), type=GrammarSpec)
    time.sleep(int(spec.output.value.split()[0]) / 1000)
    answer = msgspec.msgpack.encode(CompileReply(grammar=b"x"))
    sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
    sys.stdout.buffer.flush()
"""


@pytest.fixture
async def sleeper() -> Any:
    compiler = GrammarCompiler(limit_s=60.0, command=[sys.executable, "-c", SLEEPER])
    await compiler.start()
    yield compiler
    await compiler.close()


def sized(ms: int, name: object, n_bytes: int = 0) -> GrammarSpec:
    return spec("regex", f"{ms} {name} " + "x" * n_bytes)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_waiting_for_a_processor_is_not_held_against_a_format(sleeper: GrammarCompiler) -> None:
    sleeper.limit_s = 0.2
    assert await sleeper.compile(sized(500, "starved")) == b"x"


async def test_the_limit_is_of_cpu_time() -> None:
    spin = "import os; os.write(1, bytes(4)); os.read(0, 4)\nwhile True: pass"
    compiler = GrammarCompiler(limit_s=0.2, command=[sys.executable, "-c", spin])
    await compiler.start()
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with pytest.raises(BadInput, match=r"takes longer than 0\.2 s to compile: simplify"):
        await compiler.compile(spec("regex", "x"))
    await compiler.close()
    assert 0.2 < resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 0.6


async def test_a_small_one_does_not_wait_for_large_ones() -> None:
    compiler = GrammarCompiler(limit_s=60.0)
    await compiler.start()
    names = [[f"p{number}_{n}" for n in range(900)] for number in range(8)]
    schemas = [
        {"type": "object", "properties": {n: {"type": "string"} for n in each}, "required": each} for each in names
    ]
    large = [asyncio.create_task(compiler.compile(spec("json_schema", schema))) for schema in schemas]
    await settle()
    assert matches(decode(await compiler.compile(spec("json_schema", {"type": "integer"}))), "12")
    assert sum(task.done() for task in large) < len(large) / 2  # one, where this process had to wait for a core
    await compiler.close()
    await asyncio.gather(*large, return_exceptions=True)


async def test_what_waits_long_enough_goes_before_what_is_small(
    sleeper: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "S_PER_BYTE", 1e-6)
    ended: list[str] = []

    async def ask(name: str, ms: int, n_bytes: int = 0) -> None:
        await sleeper.compile(sized(ms, name, n_bytes))
        ended.append(name)

    busy = [asyncio.create_task(sleeper.compile(sized(300, n))) for n in range(2)]
    await settle()
    large = asyncio.create_task(ask("large", 0, 20_000))  # worth 20 ms of waiting
    await asyncio.sleep(0.1)
    later = [asyncio.create_task(ask(f"small {n}", 100)) for n in range(3)]
    await asyncio.gather(large, *busy, *later)
    assert ended.index("large") < 2


async def test_beyond_a_number_that_waits_the_largest_is_sent_away(sleeper: GrammarCompiler) -> None:
    tasks = [asyncio.create_task(sleeper.compile(sized(60_000, n, 9000 + n))) for n in range(turns.MAX_WAITING + 1)]
    await settle()
    small = asyncio.create_task(sleeper.compile(sized(0, "small")))
    await small  # it goes to the process that the large ones leave free
    assert not any(task.done() for task in tasks)
    over = asyncio.create_task(sleeper.compile(sized(0, "over", 20_000)))
    twin = asyncio.create_task(sleeper.compile(sized(0, "over", 20_000)))
    for task in (over, twin):
        with pytest.raises(Overloaded, match="try again") as caught:
            await task
        assert caught.value.retry_after_s
    assert over.exception() is not twin.exception()
    await sleeper.close()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))


async def test_turns_are_not_lost(sleeper: GrammarCompiler) -> None:
    """Whatever happens to those who wait, the processes come free again."""
    tasks = [asyncio.create_task(sleeper._compile(b"%d" % n, _encode(sized(20, n, 9000 * (n % 2))))) for n in range(20)]
    for n in range(0, 20, 3):
        await asyncio.sleep(0.005)
        tasks[n].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(60):
        pair = [asyncio.create_task(sleeper.compile(sized(0, f"pair {n}", 9000 * n))) for n in range(2)]
        assert await asyncio.gather(*pair) == [b"x", b"x"]
