"""How much, how long, how often. What an operator may tune; the rest of the queue reads it from here."""

import msgspec

INSERT_CHUNK = 500  # lines written in one transaction: what a neighbour's commit may have to wait for
UPDATE_CHUNK = 5_000  # lines that only change their state, in one transaction


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float = 60.0  # a worker that says nothing for so long is dead
    max_attempts: int = 5  # of a line that fails in a way that may pass
    max_kills: int = 3  # workers that may die under a line
    backoff_s: tuple[float, float] = (2.0, 60.0)
    urgent_s: float = 3600.0  # this close to its deadline a line goes before fairness
    max_jobs: int = 100_000  # of a batch
    max_job_bytes: int = 8 << 20  # of a request, canonical
    max_file_bytes: int = 200_000_000
    max_account_bytes: int = 32 << 30  # files, requests and results that are kept
    max_queued_jobs: int = 2_000_000  # of an account, not yet ended
    retention_days: float = 30.0  # of a batch and its results, from its end
    blob_bytes: int = 64 << 10  # a larger body is a file of its own
    blob_grace_s: float = 3600.0  # an unreferenced blob younger than that may be about to be referred to
    key_hours: float = 24.0  # an idempotency key is remembered
    sweep_s: float = 2.0

    @property
    def lease_us(self) -> int:
        return int(self.lease_s * 1e6)

    @property
    def quarantine_kills(self) -> int:
        """From so many kills on a line runs alone: the next death is surely its own doing."""
        return max(1, self.max_kills - 1)
