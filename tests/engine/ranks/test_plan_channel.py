"""Plans over a connection: a follower learns at once that rank 0 is gone, but not when a group ends in good order."""

import socket
from queue import SimpleQueue

import pytest

from emberline.engine.ranks.messages import End, Prepare, StepMessage
from emberline.engine.ranks.plan_channel import ConnectionReader, PlanWriter
from emberline.kv.transfer.connection import PeerConnection, PeerConnectionLost


@pytest.mark.parametrize("messages", [[Prepare()], [Prepare(), End()]])
def test_a_connection_that_ends_before_the_group_is_lost(messages: list[StepMessage]) -> None:
    ours, theirs = map(PeerConnection, socket.socketpair())
    lost: SimpleQueue[PeerConnectionLost] = SimpleQueue()
    reader = ConnectionReader(theirs, lost.put)
    for message in messages:
        PlanWriter(None, [ours]).write(message)
    ours.close()
    assert [reader.read(60.0) for _ in messages] == messages
    reader.join()
    assert lost.empty() == isinstance(messages[-1], End)
    theirs.close()
