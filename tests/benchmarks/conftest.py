"""`benchmarks/` lies beside the package, not in it: it is imported from the checkout's root."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
