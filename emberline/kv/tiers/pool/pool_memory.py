"""The process that lends memory of this machine to the cluster's KV pool; it serves nothing else.

Workers come and go, and their clients of the pool are killed when they hang: what was lent by them would be lost with
them. This process stays. It joins again by itself when the master was restarted.
"""

import argparse
import json
import os
import signal

from emberline.kv.tiers.pool.pool_process import connect, end_with_parent
from emberline.protocol.kv_store import StoreSettings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m emberline.kv.tiers.pool.pool_memory", description=__doc__)
    parser.add_argument("--kv-store", type=StoreSettings.parse, required=True, metavar="URL")
    parser.add_argument("--bytes", type=int, required=True, metavar="N", help="memory to lend")
    args = parser.parse_args(argv)
    end_with_parent()
    try:
        store = connect(args.kv_store, args.bytes)
    except OSError as error:
        print(json.dumps({"ready": False, "error": str(error)}), flush=True)
        return 1
    print(json.dumps({"ready": True, "pid": os.getpid(), "lends_bytes": args.bytes}), flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del store
    os._exit(0)  # the library would wait for a master that may be gone


if __name__ == "__main__":
    raise SystemExit(main())
