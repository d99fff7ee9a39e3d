"""A process that writes blocks to a disk tier until it is killed.

`python -m tests.kv.tiers.disk.disk_writer FOLDER SEED`

It prints the highest number of each batch whose write has returned.
"""

import random
import sys
from pathlib import Path

from tests.kv.tiers.disk.disk_blocks import block_id, open_tier, write

N_SLOTS = 48

if __name__ == "__main__":
    rng = random.Random(int(sys.argv[2]))
    tier = open_tier(Path(sys.argv[1]), N_SLOTS)
    first = 0
    while True:
        n = rng.randint(1, 12)
        write(tier, list(range(first, first + n)))
        first += n
        if rng.random() < 0.1:
            tier.remove([block_id(first - 1)])
        if rng.random() < 0.05:
            tier.purge(session=b"nobody".ljust(16))
        print(first - 1, flush=True)
