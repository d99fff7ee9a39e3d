"""`emberline serve` with stand-in engines as its workers.

Usage: python -m benchmarks.standin_serve SCRIPT [serve's own flags]; for SCRIPT see standins/engine_script.py.
STANDIN_CONTEXT in the environment is the context in tokens, STANDIN_KV the cache.
"""

import os
import sys
from pathlib import Path

from emberline.cli.main import main
from emberline.config import EngineConfig
from emberline.supervisor import engine_workers as local
from emberline.supervisor.process import ProcessSpec


def run(script: str, flags: list[str]) -> int:
    def standin(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        arguments = ("--name", plan.model, "--socket", str(socket), "--script", script)
        if context := os.environ.get("STANDIN_CONTEXT"):
            arguments += ("--context-len", context)
        if kv := os.environ.get("STANDIN_KV"):
            arguments += ("--kv-tokens", kv)
        env = {"EMBERLINE_WORKER_TOKEN": token}
        return ProcessSpec(name=plan.name, module="standins.standin_engine", arguments=arguments, env=env)

    local.worker_spec = standin
    return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
