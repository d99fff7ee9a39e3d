"""`emberline serve` with actors in its workers' place: everything of it but the model.

As a module: `python -m tests.e2e.clients.stage PLAY FLAGS`, with serve's own flags.
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
from tests.e2e.clients.play import Play

CONTEXT_LEN = 131_072  # agents' prompts are long
ROOT = Path(__file__).parents[3]


@contextmanager
def staged(play: Play, gguf: Path, home: Path) -> Iterator[str]:
    """The base URL of a server whose model says what the play says. A file from a shelf keeps the name it has there."""
    models = home / "models"
    models.mkdir(parents=True)
    play.write(home / "play.json")
    command = [sys.executable, "-m", "tests.e2e.clients.stage", str(home / "play.json"), "--port", "0", "--json"]
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


def run(play_file: str, flags: list[str]) -> int:
    def actor(plan: local.WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        arguments = (play_file, str(plan.path), "--name", plan.model, "--socket", str(socket))
        return ProcessSpec(
            name=plan.name,
            module="tests.e2e.clients.actor",
            arguments=(*arguments, "--context-len", str(CONTEXT_LEN)),
            env={"EMBERLINE_WORKER_TOKEN": token},
        )

    local.worker_spec = actor
    return main(["serve", *flags])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
