"""Stand-ins for optional modules of a peer, also in the processes that it starts."""

import os
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
CHILD = "import humming.layers, json; print(humming.layers.anything(1) is not None, json.dumps([1]))"


def test_a_process_and_its_children_import_absent_modules():
    code = f"""
import subprocess, sys
sys.path.append({str(PEERS)!r})
import absent_modules
absent_modules.install()
absent_modules.install()
import cv2, nvtx.nested
assert sum(isinstance(finder, absent_modules.AbsentModules) for finder in sys.meta_path) == 1
try:
    import no_such_module
except ImportError:
    subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.stdout == "True [1]\n", done.stderr
