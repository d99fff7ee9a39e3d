"""A submission with an Idempotency-Key: done once, answered as often as it is sent."""

from collections.abc import Awaitable, Callable
from hashlib import blake2b

from emberline.api.http.call import Call
from emberline.api.http.reply import HeaderList, Reply
from emberline.jobs.batches.idempotency_keys import StoredAnswer

HEADER = "idempotency-key"
_REPLAYED: HeaderList = [(b"idempotent-replayed", b"true")]


def digest_of(call: Call, *parts: bytes) -> bytes:
    """Of all that makes a submission what it is: where it goes, and what it says."""
    digest = blake2b(call.scope.get("raw_path", b"") + b"?" + call.scope["query_string"], digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


async def once(call: Call, body: bytes, fresh_id: str, submit: Callable[[str], Awaitable[bytes]]) -> Reply:
    """The answer of `submit`, which is given the id to submit under; of an earlier one, where the key is known."""
    key = call.headers.get(HEADER)
    if key is None:
        return Reply(200, await submit(fresh_id))
    keys, account = call.batches.queue.idempotency_keys, call.principal.account
    begun = await keys.begin(account, key, digest_of(call, body), fresh_id)
    if isinstance(begun, StoredAnswer):
        return Reply(200, begun.answer, headers=_REPLAYED)
    try:
        answer = await submit(begun.id)
    except BaseException:
        await keys.abandon(account, key)
        raise
    await keys.finish(account, key, answer)
    return Reply(200, answer)
