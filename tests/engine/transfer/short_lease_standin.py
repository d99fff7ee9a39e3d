"""A stand-in engine with short leases. Its first argument is "chatty" or "mute" (no keep-alives), then its flags."""

import sys

from emberline.engine.transfer import incoming
from emberline.kv.transfer import sender
from emberline.testing import standin_engine

incoming.LEASE_S, incoming.GRACE_S = 1.0, 1.0
sender.KEEP_ALIVE_S = 0.1

if __name__ == "__main__":
    if sys.argv[1] == "mute":
        sender.KEEP_ALIVE_S = 1e6
    raise SystemExit(standin_engine.main(sys.argv[2:]))
