"""Sizes in messages."""


def format_limit(n_bytes: int) -> str:
    """A limit as people write it: exact, in the largest unit of which it is a multiple."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if n_bytes and not n_bytes & ((1 << shift) - 1):
            return f"{n_bytes >> shift} {unit}"
    return f"{n_bytes:,} bytes"
