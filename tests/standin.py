"""Starts the stand-in engine where `EngineWorkers` would start the real one."""

from pathlib import Path

from emberline.config import EngineConfig
from emberline.supervisor.engine_workers import MakeSpec, WorkerPlan
from emberline.supervisor.process import ProcessSpec


def standin_worker(*flags: str) -> MakeSpec:
    """A replacement for `engine_workers.worker_spec`; `flags` are the stand-in's own."""

    def make_spec(plan: WorkerPlan, config: EngineConfig, socket: Path, token: str) -> ProcessSpec:
        identity = ("--socket", str(socket), "--name", plan.model, "--role", plan.role, "--id", plan.name)
        return ProcessSpec(
            name=plan.name,
            module="emberline.testing.standin_engine",
            arguments=(*identity, *flags),
            env={"EMBERLINE_WORKER_TOKEN": token},
        )

    return make_spec
