"""`emberline serve` with scripted engines as its workers: the whole server without a model.

As a module: `python -m tests.e2e.clients.scripted_server SCRIPT FLAGS`, with serve's own flags.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from emberline.cli.main import main
from emberline.config import EngineConfig
from emberline.supervisor import engine_workers as local
from emberline.supervisor.process import ProcessSpec
from tests.e2e.clients.reply_script import ReplyScript

CONTEXT_LEN = 131_072  # agents' prompts are long
ROOT = Path(__file__).parents[3]


@contextmanager
def scripted_server(script: ReplyScript, gguf: Path, home: Path) -> Iterator[str]:
    """The base URL of a server whose model follows the script. A file from a model store keeps its model's name."""
    models = home / "models"
    models.mkdir(parents=True)
    script.write(home / "script.json")
    command = [sys.executable, "-m", "tests.e2e.clients.scripted_server", str(home / "script.json")]
    command += ["--port", "0", "--json"]
    if (gguf.parent / "card.json").exists():
        (models / gguf.parent.name).symlink_to(gguf.parent)
    else:
        command.append(str(gguf))
    environment = {**os.environ, "EMBERLINE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the server did not start; its log is above"
            yield json.loads(line)["url"]
        finally:
            process.terminate()


def run(script_file: str, flags: list[str]) -> int:
    def scripted_worker(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        arguments = (script_file, str(plan.path), "--name", plan.model, "--socket", str(socket))
        return ProcessSpec(
            name=plan.name,
            module="tests.e2e.clients.scripted_engine",
            arguments=(*arguments, "--context-len", str(CONTEXT_LEN)),
            env={"EMBERLINE_WORKER_TOKEN": token},
        )

    local.worker_spec = scripted_worker
    return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
