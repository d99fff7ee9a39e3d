"""Runs inside the peer's own environment: llama.cpp's server out of the prebuilt wheel, until SIGTERM.

Usage: python xllamacpp_server.py MODEL PORT THREADS SLOTS CONTEXT
"""

import signal
import sys

import xllamacpp  # type: ignore[import-not-found]


def main() -> None:
    model, port, threads, slots, context = sys.argv[1], *map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_parallel = slots
    params.n_ctx = context
    server = xllamacpp.Server(params)  # everything else as llama.cpp has it: prompt cache, continuous batching
    print(xllamacpp.get_system_info(), server.listening_address, flush=True)
    signal.pause()  # SIGTERM ends the process


if __name__ == "__main__":
    main()
