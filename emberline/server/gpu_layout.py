"""`serve --gpus N` or `--gpus auto`: take the layout that the plan recommends for this machine's GPUs."""

import logging
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from emberline.config import EngineConfig
from emberline.engine.planning.recommendation import Recommendation
from emberline.protocol.errors import BadInput
from emberline.protocol.parallel_layout import Layout
from emberline.supervisor import machine

AUTO = "auto"
PLAN_S = 300.0
_MODULE = "emberline.engine.planning.recommendation"  # a process of its own: it imports torch

_log = logging.getLogger("emberline.serve")


def recommend(path: Path, count: int, engine: EngineConfig) -> Layout:
    """Ask the planner, in a process of its own, for the layout of one model on `count` GPUs."""
    limits = ("--max-running", str(engine.max_running), "--token-budget", str(engine.token_budget))
    command = (sys.executable, "-m", _MODULE, "--model", str(path), "--gpus", str(count), *limits)
    try:
        done = subprocess.run(command, capture_output=True, timeout=PLAN_S, check=False)
        found = msgspec.json.decode(done.stdout, type=Recommendation)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise BadInput(f"--gpus: no plan could be made ({error}): give --tp and --pp", param="gpus") from None
    if found.error:
        raise BadInput(found.error, param="gpus")
    return found.layout


def with_recommended_layout(
    engine: EngineConfig,
    paths: Sequence[Path],
    find_gpus: Callable[[], Sequence[str]] = machine.gpus,
    recommend: Callable[[Path, int, EngineConfig], Layout] = recommend,
) -> EngineConfig:
    """The configuration with tp, pp, ep, dcp and replicas as the plan recommends; as it is where `gpus` is not set."""
    if not engine.gpus:
        return engine
    given = Layout(tp=engine.tp, pp=engine.pp, ep=engine.ep, dcp=engine.dcp)
    if given != Layout() or engine.replicas or engine.prefill_workers:
        raise BadInput(
            "--gpus chooses the layout and the number of workers: leave --tp, --pp, --dcp, --ep, --replicas and"
            " --prefill-workers out",
            param="gpus",
        )
    if len(paths) != 1:
        raise BadInput(f"--gpus chooses the layout of one model, and there are {len(paths)}: use --tp", param="gpus")
    there = len(find_gpus()) if engine.device != "cpu" else 0
    count = there if engine.gpus == AUTO else int(engine.gpus)
    if not there or count > there:
        has = "no GPU to run on (`emberline doctor` tells what is missing)" if not there else f"{there}"
        raise BadInput(f"--gpus {engine.gpus}: this machine has {has}", param="gpus")
    layout = recommend(paths[0], count, engine)
    _log.info("the plan recommends %s", layout.name, extra={"gpus": count, "replicas": count // layout.n_ranks})
    divided = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "dcp": layout.dcp}
    return msgspec.structs.replace(engine, **divided, replicas=count // layout.n_ranks)
