"""Asks Mooncake's master over HTTP how full the pool is, and for the names of its objects."""

import http.client
import threading
import time
from typing import NamedTuple

TIMEOUT_S = 2.0
LIST_TIMEOUT_S = 30.0
REFRESH_S = 2.0
_METRICS = {
    "master_allocated_bytes": "used_bytes",
    "master_total_capacity_bytes": "capacity_bytes",
    "master_key_count": "blocks",
}


class PoolUsage(NamedTuple):
    """Usage of the whole pool."""

    used_bytes: int = 0
    capacity_bytes: int = 0
    blocks: int = 0


class MasterMetrics:
    """A `pool.PoolMaster` at host:port. `usage` returns what was last read, and has it read again when it is old."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._usage = PoolUsage()
        self._lock = threading.Lock()
        self._asked_s = float("-inf")

    def usage(self) -> PoolUsage:
        with self._lock:
            due = time.monotonic() - self._asked_s > REFRESH_S
            if due:
                self._asked_s = time.monotonic()
        if due:
            threading.Thread(target=self._refresh, name="kv-pool-usage", daemon=True).start()
        return self._usage

    def names(self) -> list[str]:
        return self._get("/get_all_keys", LIST_TIMEOUT_S).split()

    def is_healthy(self) -> bool:
        """Blocking."""
        try:
            return '"service_ready":true' in self._get("/health", TIMEOUT_S).replace(" ", "")
        except OSError:
            return False

    def _refresh(self) -> None:
        try:
            lines = self._get("/metrics", TIMEOUT_S).splitlines()
        except OSError:
            return
        found = {}
        for line in lines:
            name, _, value = line.partition(" ")
            if name in _METRICS and value.replace(".", "", 1).isdigit():
                found[_METRICS[name]] = int(float(value))
        self._usage = PoolUsage(**found)

    def _get(self, path: str, timeout_s: float) -> str:
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise OSError(f"{self._address}{path} answers {response.status}")
            return response.read().decode(errors="replace")
        except http.client.HTTPException as error:
            raise OSError(f"{self._address}{path}: {error!r}") from None
        finally:
            connection.close()
