"""The durable store behind one narrow interface: SQLite embedded, PostgreSQL beyond one machine."""

from emberline.store.connect import open_store
from emberline.store.database import Database, Many, Rows, Sql, Statement, Step, Value, Work
from emberline.store.sqlite import SqliteStore

__all__ = ["Database", "Many", "Rows", "Sql", "SqliteStore", "Statement", "Step", "Value", "Work", "open_store"]
