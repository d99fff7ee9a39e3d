"""`benchmarks/` lies beside the package, not in it: it is imported from the checkout's root."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
