"""Plans over a connection: a follower learns at once that rank 0 is gone, but not when a group ends in good order."""

import socket
import threading
from queue import SimpleQueue

import pytest

from emberline.engine.core.plan import StepPlan
from emberline.engine.ranks.messages import End, Launch, Prepare, StepMessage, orders_of
from emberline.engine.ranks.plan_channel import ConnectionReader, PlanWriter
from emberline.kv.tiers.orders import WholeBlock, WriteBlocks
from emberline.kv.tiers.tier import BlockMeta
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


def test_a_block_of_a_large_model_reaches_a_follower() -> None:
    """An import sends whole blocks: of 40 layers with 64 KV heads each, 20 MiB."""
    ours, theirs = map(PeerConnection, socket.socketpair())
    reader = ConnectionReader(theirs)
    order = WriteBlocks(1, [WholeBlock(0, b"k" * 16, BlockMeta(), bytes(20 << 20))])
    writing = threading.Thread(
        target=PlanWriter(None, [ours]).write, args=(Launch(StepPlan(orders={"tiers": [order]})),)
    )
    writing.start()
    received = reader.read(60.0)
    assert isinstance(received, Launch)
    assert orders_of(received.plan) == {"tiers": [order]}
    ours.close()
    writing.join()
    theirs.close()
