"""A stand-in engine with short leases: its first arguments are the lease and the time between two keep-alives, in
seconds, then its flags. The grace period is as long as the lease."""

import sys

from emberline.engine.transfer import incoming
from emberline.kv.transfer import sender
from standins import standin_engine

if __name__ == "__main__":
    lease_s, sender.KEEP_ALIVE_S = map(float, sys.argv[1:3])
    incoming.LEASE_S, incoming.GRACE_S = lease_s, lease_s
    raise SystemExit(standin_engine.main(sys.argv[3:]))
