"""The measured rate of a queue of reads, and what one more read has to expect of it."""

import threading
import time

from emberline.kv.tiers.fetch_policy import TierQueue

_GAIN = 0.3
MIN_RATED_BYTES = 1 << 20  # read at once: less says more about latency than about the rate


class ReadRate:
    """Thread-safe. Bytes are queued, begun, and done or dropped; work is done in order, some of it at once."""

    def __init__(self, rate: float, latency_s: float = 0.0005) -> None:
        """`rate`: bytes per second to assume before something was measured."""
        self.rate = rate
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self._queued_bytes = 0
        self._n_begun = 0
        self._since_s = 0.0  # when something was last done, or was begun with nothing before it

    def queued(self, n_bytes: int) -> None:
        with self._lock:
            self._queued_bytes += n_bytes

    def begin(self) -> None:
        with self._lock:
            if not self._n_begun:
                self._since_s = time.monotonic()
            self._n_begun += 1

    def done(self, n_bytes: int, n_valid: int | None = None) -> None:
        """Count n_bytes that were begun as done; `n_valid` is their number that could be read, if not all."""
        with self._lock:
            now_s = time.monotonic()
            took_s, self._since_s = now_s - self._since_s, now_s
            self._n_begun -= 1
            self._queued_bytes -= n_bytes
            n_bytes = n_bytes if n_valid is None else n_valid
            if n_bytes >= MIN_RATED_BYTES and took_s > 0:
                self.rate += _GAIN * (n_bytes / took_s - self.rate)

    def dropped(self, n_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= n_bytes

    def queue(self) -> TierQueue:
        """One that does not answer seems as slow as it has been silent: it is not asked again until it answers."""
        with self._lock:
            expected_s = self._latency_s + min(self._queued_bytes, 64 << 20) / max(self.rate, 1.0)
            silent_s = time.monotonic() - self._since_s if self._n_begun else 0.0
            latency_s = silent_s if silent_s > 2 * expected_s + 0.05 else self._latency_s
            return TierQueue(self.rate, self._queued_bytes, latency_s)
