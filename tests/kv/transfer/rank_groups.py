"""Rank groups of any layout for tests of transfers: the slices that their ranks have, and groups in one process."""

import time

import msgspec
import numpy as np

from emberline.engine.addresses import listening
from emberline.engine.ranks.messages import KVReport
from emberline.engine.ranks.opening import follow_kv
from emberline.engine.ranks.rank_runner import OrderReports
from emberline.engine.worker.socket_server import serve_senders
from emberline.kv.host_memory import HostMemory, private_pages, shared_pages
from emberline.kv.transfer.group_transfers import GroupTransfers
from emberline.kv.transfer.host_transfers import host_transfers
from emberline.kv.transfer.notices import BlocksReceived, BlocksReleased, OfferGranted, OfferReceived, SendAcked
from emberline.kv.transfer.orders import TransferOrder
from emberline.protocol.block_hash import BLOCK_TOKENS, KVGroup
from emberline.protocol.frames import EngineInfo, transfer_ticket
from emberline.protocol.request import Push, RankEndpoint

GROUP = KVGroup("full", (0, 1, 2, 3), kv_heads=4, head_dim=2, dtype="bfloat16")
LATENT = KVGroup("full", (0, 1, 2, 3), kv_heads=1, head_dim=6, dtype="bfloat16", planes=1)
LAYOUTS = [
    (GROUP, {"tp": 1}, {"tp": 1}),
    (GROUP, {"tp": 2}, {"tp": 2}),
    (GROUP, {"tp": 2}, {"tp": 1}),
    (GROUP, {"tp": 1}, {"tp": 2}),
    (GROUP, {"tp": 8}, {"tp": 2}),
    (GROUP, {"pp": 2}, {"tp": 2}),
    (GROUP, {"tp": 2, "pp": 2}, {"tp": 4}),
    (LATENT, {"tp": 2}, {"tp": 2, "dcp": 2}),
    (LATENT, {"tp": 4, "dcp": 4}, {"tp": 2, "pp": 2, "dcp": 2}),
]
N_BLOCKS = 8


def divided(group, tp=1, pp=1, dcp=1):
    """The slices of every rank of a layout, rank = stage * tp + tp_rank, as the model's shards make them."""
    ranks = []
    for stage in range(pp):
        n = len(group.layers) // pp
        for rank in range(tp):
            n_heads = max(1, group.kv_heads // tp)
            n_tokens = BLOCK_TOKENS // dcp
            ranks.append((
                msgspec.structs.replace(
                    group,
                    layers=group.layers[stage * n : (stage + 1) * n],
                    kv_heads=n_heads,
                    first_head=rank * group.kv_heads // tp,
                    tokens=(rank % dcp * n_tokens, (rank % dcp + 1) * n_tokens),
                ),
            ))  # fmt: skip
    return tuple(ranks)


def whole_block(group, seed=1):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 16, group.block_shape).astype(np.uint16)


def part(block, group, whole):
    first = whole.layers.index(group.layers[0])
    heads = slice(group.first_head, group.first_head + group.kv_heads)
    return np.ascontiguousarray(block[first : first + len(group.layers), :, heads, slice(*group.tokens)])


def serve(address, transfers, info, closing, token="secret", limits=None):
    """Let engines that send KV connect to a rank. Returns where."""
    listener, bound = closing.enter_context(listening(address))
    closing.callback(serve_senders(listener, info, token, transfers.accept, limits))
    return bound


class Member:
    """What a follower knows of its group."""

    def __init__(self, rank, slices, leader):
        self.rank, self.slices, self._leader = rank, slices, leader

    def send(self, report):
        encoded = msgspec.msgpack.encode(report)  # as it reaches rank 0
        self._leader.report(self.rank, msgspec.msgpack.decode(encoded, type=KVReport).transfers)


class Group:
    """A rank group whose ranks are threads of this process: rank 0 tells the others directly what to do."""

    def __init__(self, whole, layout, folder, name, closing, shared=False):
        self.whole, self.slices = whole, divided(whole, **layout)
        self.pools, self.ranks, self.endpoints = [], [], []
        for rank, slices in enumerate(self.slices):
            memory, manager = self.open_rank(slices, shared)
            info = EngineInfo(
                model="m", fingerprint="fake", context_len=1, vocab_size=1, eos_ids=(), transfers=manager.receives_by
            )
            address = serve(str(folder / f"{name}{rank}"), manager, info, closing)
            self.pools.append(memory)
            self.ranks.append(manager)
            self.endpoints.append(RankEndpoint(address, slices))
            if rank == 0:
                closing.callback(manager.close)
        self.leader = GroupTransfers(self.ranks[0], self.slices if len(self.ranks) > 1 else ())
        self.followers = []
        for rank, manager in enumerate(self.ranks[1:], 1):
            member = Member(rank, self.slices, self.leader)
            self.followers.append(follow_kv(member, manager, None))
            closing.callback(OrderReports(member, self.followers[-1]).close)
        self.leader.order = self._order

    def open_rank(self, slices, shared):
        pages = [(shared_pages if shared else private_pages)(N_BLOCKS * group.block_bytes) for group in slices]
        descriptors = [page.descriptor for page in pages] if shared else []
        views = [memoryview(page.buffer) for page in pages]
        memory = HostMemory(views, [group.block_bytes for group in slices], descriptors)
        return memory, host_transfers("fake", slices, memory)

    def _order(self, order):
        encoded = msgspec.msgpack.encode(order)
        for follower in self.followers:
            follower["transfers"].execute([msgspec.msgpack.decode(encoded, type=TransferOrder)])
        self.leader.own.execute([order])

    def expect(self, kind):
        """All notices until there is one of a kind: that one is moved to the end."""
        found, until_s = [], time.monotonic() + 60
        while not any(isinstance(each, kind) for each in found):
            assert time.monotonic() < until_s, f"no {kind} among {found}"
            found += self.leader.notices()
            time.sleep(0.001)
        return sorted(found, key=lambda each: isinstance(each, kind))

    def fill(self, block, content):
        for memory, (group,) in zip(self.pools, self.slices):
            memory.block(0, block)[:] = part(content, group, self.whole).tobytes()

    def has(self, block, content):
        return all(
            bytes(memory.block(0, block)) == part(content, group, self.whole).tobytes()
            for memory, (group,) in zip(self.pools, self.slices)
        )


def pair(whole, senders, receivers, folder, closing, shared=False, kind=Group):
    sender = kind(whole, senders, folder, "s", closing)
    receiver = kind(whole, receivers, folder, "r", closing, shared)
    divided_push = len(sender.ranks) > 1 or len(receiver.ranks) > 1
    push = Push(
        transfer="t",
        address=receiver.endpoints[0].address,
        ticket=transfer_ticket("secret", "sender"),
        ranks=tuple(receiver.endpoints) if divided_push else (),
    )
    return sender, receiver, push


def granted(sender, receiver, push, blocks, epoch=1):
    """Offer and grant; the peer as the receiver's step loop knows it."""
    sender.leader.offer(7, push, 2, b"key")
    *_, offered = receiver.expect(OfferReceived)
    assert offered.offer.tags == tuple(group.tag for group in receiver.slices[0])
    receiver.leader.grant(offered.peer, "t", epoch, [blocks])
    *_, told = sender.expect(OfferGranted)
    assert told.wanted == [set(blocks)]
    return offered.peer


def check_received(sender, receiver, push):
    """Two blocks, one after the other: each rank of the receiver has its slices of them, and nothing is left open."""
    whole = sender.whole
    contents = [whole_block(whole, seed) for seed in (1, 2)]
    sender.fill(3, contents[0])
    sender.fill(1, contents[1])
    granted(sender, receiver, push, {0: 5, 1: 2})
    sender.leader.send(7, [((0, 0), 3)])
    sender.leader.send(7, [((0, 1), 1)])
    received = []
    while len(received) < 2:
        said = [each for each in receiver.expect(BlocksReceived) if isinstance(each, BlocksReceived)]
        received += [item for each in said for item in each.items]
    assert sorted(received) == [(0, 0), (0, 1)]
    assert receiver.has(5, contents[0])
    assert receiver.has(2, contents[1])
    said = sender.expect(SendAcked)
    released = [item for each in said if isinstance(each, BlocksReleased) for item in each.items]
    assert sorted(released) == [(0, 0), (0, 1)]
    assert not sender.leader._outgoing
    assert not receiver.leader._incoming
