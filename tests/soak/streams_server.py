"""`emberline serve` for the soak of streams: stand-ins in their roles, or the real model.

python -m tests.soak.streams_server SCRIPT [serve's own flags]; with SCRIPT "real", the real model.
"""

import sys
from pathlib import Path

from emberline.cli.main import main
from emberline.config import EngineConfig
from emberline.supervisor import engine_workers as local
from emberline.supervisor import process as child
from emberline.supervisor.process import ChildSpec
from tests.soak import door  # noqa: F401  builds no grammars ahead, since nothing asks for any

SIZES = ("--max-running", "16", "--token-budget", "256", "--kv-tokens", "65536", "--head-dim", "16")


def run(script: str, flags: list[str]) -> int:
    def standin(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ChildSpec:
        arguments = ("--name", plan.model, "--socket", str(socket), "--script", script, *SIZES)
        arguments += ("--role", plan.role, "--id", plan.name)
        env = {"EMBERLINE_WORKER_TOKEN": token}
        return ChildSpec(name=plan.name, module="emberline.testing.standin_engine", arguments=arguments, env=env)

    if script != "real":
        local.worker_spec = standin
    child.FIRST_RETRY_S = child.LAST_RETRY_S = 0.1  # ours dies more often than any process should
    return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
