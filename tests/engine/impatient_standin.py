"""A stand-in whose leases are short: `python -m tests.engine.impatient_standin SILENT`, then the stand-in's own flags.

With SILENT "mute" it gives no signs of life while it computes.
"""

import sys

from emberline.engine.transfer import incoming as arrivals
from emberline.kv.transfer import sender
from emberline.testing import standin_engine as standin

arrivals.LEASE_S, arrivals.DOUBT_S = 0.6, 0.2
sender.ALIVE_S = 0.1

if __name__ == "__main__":
    if sys.argv[1] == "mute":
        sender.ALIVE_S = 1e6
    raise SystemExit(standin.main(sys.argv[2:]))
