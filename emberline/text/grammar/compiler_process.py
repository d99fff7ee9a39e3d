"""A process that compiles grammars: `python -m emberline.text.grammar.compiler_process MEMORY_BYTES CPU_S`.

Frames on its stdin and stdout: length (u32, little-endian), then msgpack. In: a `GrammarSpec`; out: a `CompileReply`.
"""

import resource
import signal
import struct
import sys
from typing import BinaryIO

import msgspec

from emberline.protocol.errors import EmberlineError, ErrorInfo, Internal
from emberline.protocol.grammar import encode
from emberline.text.grammar.reply_grammar import GrammarSpec, build

LENGTH = struct.Struct("<I")
READY = LENGTH.pack(0)  # an empty frame, written once the process accepts requests


class CompileReply(msgspec.Struct, frozen=True, array_like=True):
    grammar: bytes = b""
    error: ErrorInfo | None = None


def compile_spec(spec: bytes) -> CompileReply:
    try:
        return CompileReply(grammar=encode(build(msgspec.msgpack.decode(spec, type=GrammarSpec))))
    except EmberlineError as error:
        return CompileReply(error=error.info())
    except (MemoryError, RecursionError):
        return CompileReply(error=ErrorInfo("bad_input", "the requested format is too complex: simplify it"))


def _read(stream: BinaryIO, size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def main() -> None:
    memory_bytes, cpu_s = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service ends this process
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    sink.write(READY)
    sink.flush()
    while (head := _read(source, LENGTH.size)) is not None:
        spec = _read(source, LENGTH.unpack(head)[0])
        if spec is None:
            return
        try:
            reply = compile_spec(spec)
        except Exception as error:  # our bug: reported and logged, and the process goes on
            print(f"building a grammar failed: {error!r}", file=sys.stderr, flush=True)
            reply = CompileReply(error=Internal("building the grammar failed").info())
        data = msgspec.msgpack.encode(reply)
        sink.write(LENGTH.pack(len(data)) + data)
        sink.flush()


if __name__ == "__main__":
    main()
