"""Limits of the queue and of batches that an operator may tune."""

import msgspec

INSERT_CHUNK = 500  # jobs inserted in one transaction; bounds how long another commit waits
UPDATE_CHUNK = 5_000  # jobs that only change their state in one transaction


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    lease_s: float = 60.0  # without a heartbeat for so long a worker counts as dead
    max_attempts: int = 5  # of a job that fails with a transient error
    max_kills: int = 3  # workers that may die under a job before it goes to the dead-letter queue
    backoff_s: tuple[float, float] = (2.0, 60.0)
    urgent_s: float = 3600.0  # this close to its deadline a job goes before fair queueing
    max_jobs: int = 100_000  # per batch
    max_job_bytes: int = 8 << 20  # of an encoded request
    max_file_bytes: int = 200_000_000
    max_account_bytes: int = 32 << 30  # of stored files, requests and results
    max_queued_jobs: int = 2_000_000  # per account, not yet ended
    retention_days: float = 30.0  # of a batch and its results, from its end
    blob_bytes: int = 64 << 10  # a larger body is stored as a blob
    blob_grace_s: float = 3600.0  # a younger blob without a reference may be about to get one
    key_hours: float = 24.0  # retention of an idempotency key
    sweep_s: float = 2.0
    transcript_s: float = 0.1  # between two parts of a transcript: each costs a commit
    transcript_retry_s: float = 0.5  # while the store is unavailable
    store_retry_s: tuple[float, float] = (0.1, 5.0)  # first and last wait before an outcome is written again

    @property
    def lease_us(self) -> int:
        return int(self.lease_s * 1e6)

    @property
    def quarantine_kills(self) -> int:
        """Number of kills from which on a job runs alone, so that it is certainly the cause of the next one."""
        return max(1, self.max_kills - 1)
