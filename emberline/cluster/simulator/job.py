"""One request on its way through the modelled fleet."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """What is asked, when, and what became of it. Times are virtual seconds."""

    id: str
    number: int
    session: int
    tenant: int
    path: tuple[int, ...]  # segments, their numbers unique in the simulation
    lengths: tuple[int, ...]  # blocks of each
    n_prompt: int
    n_output: int
    block_tokens: int
    asked_s: float
    reply: tuple[int, int] = (0, 0)  # (segment, blocks) that the reply fills, if known
    known_tokens: int = 0  # that a shared cache without bounds would have had
    cached_tokens: int = 0  # that were not computed
    decode: str = ""  # the worker that wrote the reply
    prefill: str = ""  # the one that computed the prompt, if another
    first_s: float = -1.0  # when its first token was there
    ended_s: float = -1.0
    n_preempted: int = 0

    @property
    def time_per_token_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1, self.n_output - 1)


@dataclass(slots=True, eq=False)
class Seq:
    """A job's stay on one worker."""

    job: Job
    rank: int  # arrival at the worker
    n_prompt: int  # to be computed here before the first token, or the next one after a preemption
    n_output: int  # to be written here; 0: a prefill worker's
    awaits: bool = False  # the prompt's blocks come from another worker
    done: int = 0  # prompt tokens that are there
    n_held: int = 0  # segments of the path that it holds in the cache
    n_full: int = 0  # of them, those that are there in full, and their blocks
    full_blocks: int = 0
    reserved: int = 0  # blocks beside those
    written: int = 0  # tokens of the reply, when it last began to decode
    began_step: int = -1  # the worker's count of steps at that time; -1: it does not decode
