"""OpenAI's files: uploaded, listed, read back, deleted. A batch's results are files too, made when they are read."""

import re
from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Any

from emberline.api.admin.events import list_of, whole_number
from emberline.api.batch_loader import BatchService
from emberline.api.batches.job_format import NOT_SUCCEEDED, SUCCEEDED, results_of
from emberline.api.batches.submission import HEADER, digest_of
from emberline.api.http.body import pieces
from emberline.api.http.call import Call, Reply, encode, json_reply
from emberline.api.http.errors import NoSuchFile
from emberline.api.http.multipart import Multipart, Part, boundary_of
from emberline.api.http.sse import JSONL, gathered, pieces_of, send_bytes
from emberline.api.openai.batch_jobs import output_line
from emberline.jobs.batches.batch import Batch
from emberline.jobs.batches.files import File
from emberline.jobs.batches.idempotency_keys import StoredAnswer
from emberline.jobs.queue.queue import Queue
from emberline.protocol.errors import BadInput, NotFound

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_PAGE = 10_000
MAX_NAME_CHARS = 255
_FORM_BYTES = 1 << 20  # of a form beside the file in it
_RESULTS = re.compile(r"file-(batch_[0-9a-f]{32})-(output|errors)")
_OWN = re.compile(r"file-[0-9a-f]{24}")
_DAY_S = 86_400
_MAX_SIZES = 4096  # remembered
_EXPIRES = ("expires_after[anchor]", "expires_after[seconds]")

PAGE = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": ["asc", "desc"]},
    "purpose": {"type": "string"},
}

Json = dict[str, Any]


async def create(call: Call) -> Reply:
    """The file goes to disk as it arrives; the fields may come before it or after it."""
    queue = call.batches.queue
    boundary = boundary_of(call.headers.get("content-type", ""))
    form = Multipart(pieces(call, queue.limits.max_file_bytes + _FORM_BYTES), boundary)
    uploaded = await _uploaded(call, form)
    if HEADER not in call.headers:
        return json_reply(_shown(uploaded))
    return await _once(call, uploaded)


async def list_all(call: Call) -> Reply:
    query = call.query()
    limit = whole_number(query, "limit", MAX_PAGE, 1, MAX_PAGE)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadInput("`order` may be asc or desc", param="order")
    found, has_more = await call.batches.queue.files.list(
        call.principal.account,
        purpose=query.get("purpose"),
        after=query.get("after"),
        limit=limit,
        order="asc" if order == "asc" else "desc",
    )
    return json_reply(list_of([_shown(file) for file in found], has_more))


async def retrieve(call: Call) -> Reply:
    if batch := await _batch_of(call):
        return json_reply(await _shown_results(call.batches, batch, call.tail))
    return json_reply(_shown(await _file(call)))


async def delete(call: Call) -> Reply:
    if batch := await _batch_of(call):
        raise BadInput(f"the file is made of the results of {batch.id} and goes with it: DELETE /v1/batches/{batch.id}")
    await _file(call)
    await call.batches.queue.files.delete(call.principal.account, call.tail)
    return json_reply({"id": call.tail, "object": "file", "deleted": True})


async def content(call: Call) -> None:
    queue = call.batches.queue
    if batch := await _batch_of(call):
        await send_bytes(call, gathered(_lines(queue, batch, call.tail)), JSONL)
        return
    file = await _file(call)
    size = (b"content-length", b"%d" % file.n_bytes)
    await send_bytes(call, pieces_of(queue.files.content(file)), b"application/octet-stream", [size])


# --- results, as files ------------------------------------------------------------------------------------------------


def output_file_id(batch: Batch) -> str | None:
    return f"file-{batch.id}-output" if batch.ended and batch.counts.completed else None


def error_file_id(batch: Batch) -> str | None:
    n_errors = batch.counts.ended - batch.counts.completed
    return f"file-{batch.id}-errors" if batch.ended and n_errors else None


async def _batch_of(call: Call) -> Batch | None:
    """The batch of which the call's file shows the results; None: it is a file that was uploaded."""
    found = _RESULTS.fullmatch(call.tail)
    if found is None:
        return None
    try:
        return await call.batches.queue.batch(call.principal.account, found[1])
    except NotFound:
        raise _no_such(call.tail) from None


async def _lines(queue: Queue, batch: Batch, file_id: str) -> AsyncIterator[bytes]:
    """The results so far, by line."""
    if batch.status == "validating" or batch.input_blob is None:
        return
    states = SUCCEEDED if file_id.endswith("-output") else NOT_SUCCEEDED
    async for result in results_of(queue, batch, states):
        yield output_line(result, batch.endpoint)


async def _shown_results(desk: BatchService, batch: Batch, file_id: str) -> Json:
    """Its size is known once it was made, and then remembered."""
    key = (file_id, batch.counts.ended)
    if (size := desk.sizes.get(key)) is None:
        size = 0
        async for line in _lines(desk.queue, batch, file_id):
            size += len(line)
        if len(desk.sizes) >= _MAX_SIZES:
            desk.sizes.clear()
        desk.sizes[key] = size
    kind = "output" if file_id.endswith("-output") else "error"
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": (batch.ended_us or batch.created_us) // 1_000_000,
        "expires_at": batch.expires_us and batch.expires_us // 1_000_000,
        "filename": f"{batch.id}_{kind}.jsonl",
        "purpose": "batch_output",
        "status": "processed",
        "status_details": None,
    }


# --- uploads ----------------------------------------------------------------------------------------------------------


async def _uploaded(call: Call, form: Multipart) -> File:
    queue, account = call.batches.queue, call.principal.account
    fields: dict[str, str] = {}
    name, blob = "", ""
    async for part in form:
        if part.name == "file" and not blob:
            name = _name(part)
            if "purpose" in fields:  # what usually comes first
                stored = await queue.files.add(account, name, _purpose(fields), form.content(), _expiry(fields))
                return await _finished(call, form, fields, stored)
            blob, _ = await queue.blobs.put_stream(form.content(), queue.limits.max_file_bytes)
        else:
            fields[part.name] = await form.field(part)
    if not blob:
        raise BadInput("the form has no part `file`", param="file")
    return await queue.files.add(account, name, _purpose(fields), queue.blobs.stream(blob), _expiry(fields))


async def _finished(call: Call, form: Multipart, fields: dict[str, str], stored: File) -> File:
    """The rest of the form, which may say more of the file."""
    files, account = call.batches.queue.files, call.principal.account
    try:
        before = dict(fields)
        async for part in form:
            if part.name == "file":
                raise BadInput("the form has more than one file", param="file")
            fields[part.name] = await form.field(part)
        if (_purpose(fields), _expiry(fields)) == (_purpose(before), _expiry(before)):
            return stored
        return await files.add(account, stored.name, _purpose(fields), files.content(stored), _expiry(fields))
    except BaseException:
        await files.delete(account, stored.id)
        raise


async def _once(call: Call, uploaded: File) -> Reply:
    """Only now is it known what the file says: one that is there already takes its place."""
    files, keys, account = call.batches.queue.files, call.batches.queue.idempotency_keys, call.principal.account
    said = "\0".join((uploaded.blob, uploaded.name, uploaded.purpose))
    key, digest = call.headers[HEADER], digest_of(call, blake2b(said.encode(), digest_size=16).digest())
    try:
        begun = await keys.begin(account, key, digest, uploaded.id)
    except BaseException:
        await files.delete(account, uploaded.id)
        raise
    if isinstance(begun, StoredAnswer):
        await files.delete(account, uploaded.id)
        return Reply(200, begun.answer, headers=[(b"idempotent-replayed", b"true")])
    answer = encode(_shown(uploaded))
    await keys.finish(account, key, answer)
    return Reply(200, answer)


def _name(part: Part) -> str:
    if part.filename is None:
        raise BadInput("the part `file` has no `filename`", param="file")
    return part.filename.replace("\\", "/").rpartition("/")[2].replace("\0", "")[:MAX_NAME_CHARS] or "file"


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        said = "is missing" if purpose is None else f"{purpose[:80]!r} is unknown"
        raise BadInput(f"`purpose` {said}: it may be {', '.join(PURPOSES)}", param="purpose")
    return purpose


def _expiry(fields: dict[str, str]) -> float | None:
    anchor, seconds = (fields.get(name) for name in _EXPIRES)
    if seconds is None:
        return None
    if anchor not in (None, "created_at"):
        raise BadInput("`expires_after.anchor` must be created_at", param="expires_after.anchor")
    return float(whole_number({"seconds": seconds}, "seconds", 0, 3600, 30 * _DAY_S))


async def _file(call: Call) -> File:
    if not _OWN.fullmatch(call.tail):
        raise _no_such(call.tail)
    try:
        return await call.batches.queue.files.get(call.principal.account, call.tail)
    except NotFound:
        raise _no_such(call.tail) from None


def _no_such(file_id: str) -> NoSuchFile:
    return NoSuchFile(f"there is no file {file_id[:100]!r}: it was deleted or has expired, or never was", param="id")


def _shown(file: File) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.n_bytes,
        "created_at": file.created_us // 1_000_000,
        "expires_at": file.expires_us and file.expires_us // 1_000_000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
