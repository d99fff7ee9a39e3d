"""Dead letters given another chance."""

from emberline.jobs import statements as sql
from emberline.jobs.batch import Batch
from emberline.jobs.loading import enter_lanes
from emberline.store import Step, Work


def replay(batch: Batch, numbers: list[int], deadline_us: int) -> Work[int]:
    """Back to the queue. A batch that has ended stays ended; its counts follow when the lines end again."""
    revived: list[tuple[str, int]] = []
    for number in numbers:
        for model, _, cost in (yield Step(sql.REPLAY_LINE, (deadline_us, batch.id, number))):
            revived.append((str(model), int(cost or 0)))
            yield Step(sql.DROP_BODY, (batch.id, number))
    if revived:
        yield from enter_lanes(batch.account, revived)
        yield Step(sql.COUNT, (0, -len(revived), *[0] * 7, batch.id))
    return len(revived)
