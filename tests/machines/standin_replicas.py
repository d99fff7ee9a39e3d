"""`emberline serve` whose planner has Ray start stand-in engines: `python -m tests.machines.standin_replicas serve …`.

Everything else is the command's own. A stand-in engine computes nothing, so its rates are those of its script, however
busy the machine is.
"""

import os
import sys
from typing import Any

from emberline.supervisor.cluster import ray_launcher

ARGUMENTS = "EMBERLINE_TEST_ENGINE_ARGUMENTS"  # of each engine


class StandinLauncher(ray_launcher.RayLauncher):
    def __init__(self, *args: Any, **more: Any) -> None:
        arguments = tuple(os.environ[ARGUMENTS].split())
        super().__init__(*args, **{**more, "module": "standins.standin_engine", "arguments": arguments})


if __name__ == "__main__":
    ray_launcher.RayLauncher = StandinLauncher  # type: ignore[misc]
    from emberline.cli.main import main

    sys.exit(main())
