"""Before a worker ends, the conversations that it has cached are sent to the others, which go on with them.

A conversation whose token ids this core knows is computed once more as a request on two workers is: the worker that
drains finds its beginning in its cache and sends the KV, another one receives it under the same content keys, generates
one token that no client gets, and has it cached. The prefix index learns of it by KV events, as always.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from emberline.balancer.admission_controller import AdmissionController
from emberline.cluster.engine_client import EngineClient
from emberline.cluster.prefill_handover import hand_over
from emberline.protocol import block_hash
from emberline.protocol.block_hash import BLOCK_TOKENS, DIGEST_BYTES
from emberline.protocol.errors import EmberlineError
from emberline.protocol.frames import EngineInfo
from emberline.protocol.request import EngineRequest, Priority, SamplingParams

MAX_CONVERSATIONS = 512
MAX_SHARE = 0.25  # of the receiver's KV cache: it has conversations of its own
MIN_BLOCKS = 4  # of a conversation: less is computed as fast
CONCURRENCY = 4

log = logging.getLogger("emberline.balancer")


class RecentConversation(NamedTuple):
    """Token ids of a conversation that was used lately, and whose cached KV it is."""

    blocks: tuple[bytes, ...]  # of ids, which conversations with the same beginning share
    salt: bytes
    session: str | None

    @property
    def ids(self) -> bytes:
        """Token ids, u32 little-endian. Copies them."""
        return b"".join(self.blocks)


# Given a model's fingerprint and a number, returns a slow function that lists that many conversations, newest first.
Recent = Callable[[str, int], Callable[[], list[RecentConversation]]]


class PrefixPusher:
    """Sends the cached conversations of a worker that drains to other workers. Owned by the core process."""

    def __init__(
        self,
        recent: Recent,
        admission: AdmissionController,
        engines: Mapping[str, EngineClient],
        limit_s: float = 10.0,
        max_bytes: int = 8 << 30,
    ) -> None:
        """`limit_s` is the time for all conversations of a worker, `max_bytes` the KV that it may send in all."""
        self._limit_s, self._max_bytes = limit_s, max_bytes
        self._recent = recent
        self._admission = admission
        self._engines = engines  # by name

    async def push(self, name: str) -> int:
        """Send the conversations that were used last from this worker to others of its model, for `limit_s` at most.

        Leaves out those that another worker has already. Returns how many tokens were sent."""
        sender = self._engines.get(name)
        receivers = [] if sender is None else self._receivers(sender)
        if sender is None or sender.info is None or not receivers:
            return 0
        found = iter(await asyncio.to_thread(self._recent(sender.info.fingerprint, MAX_CONVERSATIONS)))
        sent: Counter[str] = Counter()  # tokens, by receiver
        try:
            async with asyncio.timeout(self._limit_s), asyncio.TaskGroup() as group:
                for _ in range(CONCURRENCY):
                    group.create_task(self._push_each(found, sender, receivers, sent))
        except TimeoutError:
            log.info("not all conversations of %s could be sent to others in %.0f s", name, self._limit_s)
        if sent:
            log.info("conversations of %s were sent to other workers", name, extra={"tokens": dict(sent)})
        return sent.total()

    def _receivers(self, sender: EngineClient) -> list[EngineClient]:
        """Other ready workers with the same weights, region and account. If some have the same stage, only those."""
        assert sender.info is not None
        own = sender.endpoint
        ready = {worker.name for worker in self._admission.balancer.fleet.workers_of(own.models[0]) if worker.ready}
        found = [
            each
            for each in self._engines.values()
            if each.name in ready - {own.name}
            and each.info is not None
            and each.info.transfers
            and each.info.fingerprint == sender.info.fingerprint
            and (each.endpoint.region, each.endpoint.account) == (own.region, own.account)
        ]
        is_prefill = sender.role == "prefill"
        return [each for each in found if each.role == "both" or (each.role == "prefill") == is_prefill] or found

    async def _push_each(
        self,
        found: Iterator[RecentConversation],
        sender: EngineClient,
        receivers: list[EngineClient],
        sent: Counter[str],
    ) -> None:
        for conversation in found:
            if not sender.connected:
                return
            try:
                await self._push_one(conversation, sender, receivers, sent)
            except EmberlineError as error:
                log.info("a conversation of %s was not sent to another worker: %s", sender.name, error.message)

    async def _push_one(
        self, conversation: RecentConversation, sender: EngineClient, receivers: list[EngineClient], sent: Counter[str]
    ) -> None:
        assert sender.info is not None
        ids = conversation.ids
        root = block_hash.root(sender.info.fingerprint, conversation.salt)
        keys = await asyncio.to_thread(block_hash.chain, root, ids)
        depths = self._depths(sender.endpoint.models[0], keys)
        n_blocks = min(depths.get(sender.name, 0), (len(ids) // 4 - 1) // BLOCK_TOKENS)
        if n_blocks < MIN_BLOCKS or any(depths.get(each.name, 0) >= n_blocks for each in receivers):
            return
        n_tokens = n_blocks * BLOCK_TOKENS
        token_bytes = kv_bytes_per_token(sender.info)
        room = {each: _kv_tokens(each) * MAX_SHARE - sent[each.name] for each in receivers if each.connected}
        receiver = max(room, key=lambda each: room[each], default=None)
        if receiver is None or room[receiver] < n_tokens or (sent.total() + n_tokens) * token_bytes > self._max_bytes:
            return
        sent[receiver.name] += n_tokens  # before it is: others are chosen meanwhile
        request = EngineRequest(
            id=f"push-{secrets.token_hex(8)}",
            prompt_ids=ids[: 4 * (n_tokens + 1)],
            sampling=SamplingParams(max_tokens=1),
            salt=conversation.salt,
            session=conversation.session,
            priority=Priority.BATCH,
            keys=keys[: n_blocks * DIGEST_BYTES],
        )
        try:
            await _compute(sender, receiver, request)
        except BaseException:
            sent[receiver.name] -= n_tokens
            raise

    def _depths(self, model: str, keys: bytes) -> dict[str, int]:
        """Return the number of leading blocks that each worker has cached."""
        balancer = self._admission.balancer
        match = balancer.fleet.index.match(keys)
        return {
            worker.name: next((depth for depth, bits in match if bits & worker.slot_bits), 0)
            for worker in balancer.fleet.workers_of(model)
        }


def kv_bytes_per_token(info: EngineInfo) -> float:
    """Return the bytes of KV that a token takes on all ranks together."""
    ranks = [rank.kv_groups for rank in info.ranks] or [info.kv_groups]
    return sum(map(block_hash.bytes_per_token, ranks))


def _kv_tokens(engine: EngineClient) -> int:
    return 0 if engine.info is None else engine.info.kv_tokens


async def _compute(sender: EngineClient, receiver: EngineClient, request: EngineRequest) -> None:
    """Returns when the receiver has the KV. EmberlineError: it does not."""
    stream, prefill = hand_over(sender, receiver, request)
    try:
        while (await stream.next())[-1].finish is None:
            pass
    finally:
        stream.close()
        prefill.close()
