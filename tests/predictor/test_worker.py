"""The process of a predictor's worker, apart from what it serves."""

import os
import subprocess
import sys

JOIN = """
import os, threading
from emberline.predictor.worker import join_processors
ended = threading.Event()
thread = threading.Thread(target=ended.wait)
thread.start()
join_processors({processor})
print(*{{each for tid in os.listdir("/proc/self/task") for each in os.sched_getaffinity(int(tid))}})
join_processors(set())
ended.set()
"""


def test_all_threads_join_the_predictors_processors() -> None:
    processor = max(os.sched_getaffinity(0))
    script = JOIN.format(processor={processor})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(processor)]
