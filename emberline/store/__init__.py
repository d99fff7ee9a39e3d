"""The durable store: `Store.open`, `write`, `read`, `close`. SQLite now, PostgreSQL later behind the same four."""

from emberline.store.sqlite import Store

__all__ = ["Store"]
