"""OpenAI's files: uploaded, listed, downloaded, deleted. A batch's results are files too, generated when read."""

import re
from hashlib import blake2b
from typing import Any

from emberline.api.batches.job_format import NOT_SUCCEEDED, SUCCEEDED, batch_results
from emberline.api.batches.submission import IDEMPOTENCY_KEY, REPLAYED, request_digest
from emberline.api.http.body import body_chunks
from emberline.api.http.exchange import BatchQueue, HttpExchange, Reply, encode, json_reply, list_reply, parse_int
from emberline.api.http.streaming import JSONL, ByteStream, Chunks
from emberline.api.openai.batch_jobs import result_line
from emberline.jobs.batches.batch import Batch
from emberline.jobs.batches.files import File
from emberline.jobs.batches.idempotency_keys import StoredAnswer
from emberline.jobs.queue.queue import Queue
from emberline.net.multipart import FormPart, MultipartForm, boundary_of
from emberline.protocol.errors import BadInput, NoSuchFile, NotFound

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_PAGE = 10_000
MAX_NAME_CHARS = 255
_FORM_BYTES = 1 << 20  # of a form besides the file in it
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_RESULT_FILE = re.compile(r"file-(batch_[0-9a-f]{32})-(output|errors)")
_UPLOADED_FILE = re.compile(r"file-[0-9a-f]{24}")
_DAY_S = 86_400
_MAX_SIZES = 4096  # cached sizes of result files
_ORDERS = ("asc", "desc")

PAGE = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"enum": list(_ORDERS)},
    "purpose": {"type": "string"},
}

Json = dict[str, Any]


async def create(call: HttpExchange) -> Reply:
    """The file is written to disk as it arrives; the form's fields may come before or after it."""
    boundary = boundary_of(call.headers.get("content-type", ""))
    form = MultipartForm(body_chunks(call, call.queue.limits.max_file_bytes + _FORM_BYTES), boundary)
    uploaded = await _upload(call, form)
    if IDEMPOTENCY_KEY not in call.headers:
        return json_reply(_file_body(uploaded))
    return await _deduplicate(call, uploaded)


async def list_all(call: HttpExchange) -> Reply:
    found, has_more = await call.queue.files.list(
        call.principal.account,
        purpose=call.query.get("purpose"),
        after=call.query.get("after"),
        limit=call.int_param("limit", MAX_PAGE, 1, MAX_PAGE),
        order="asc" if call.enum_param("order", _ORDERS, "desc") == "asc" else "desc",
    )
    return list_reply([_file_body(file) for file in found], has_more)


async def retrieve(call: HttpExchange) -> Reply:
    if batch := await _batch_of_results(call):
        return json_reply(await _result_file_body(call.batches, batch, call.path_param))
    return json_reply(_file_body(await _find_file(call)))


async def delete(call: HttpExchange) -> Reply:
    if batch := await _batch_of_results(call):
        raise BadInput(f"the file holds the results of {batch.id}; delete them with DELETE /v1/batches/{batch.id}")
    await _find_file(call)
    await call.queue.files.delete(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "object": "file", "deleted": True})


async def content(call: HttpExchange) -> ByteStream:
    if batch := await _batch_of_results(call):
        return ByteStream(_result_lines(call.queue, batch, call.path_param), JSONL)
    file = await _find_file(call)
    length = (b"content-length", b"%d" % file.n_bytes)
    return ByteStream(call.queue.files.content(file), b"application/octet-stream", headers=[length])


# --- result files -----------------------------------------------------------------------------------------------------


def output_file_id(batch: Batch) -> str | None:
    return f"file-{batch.id}-output" if batch.ended and batch.counts.completed else None


def error_file_id(batch: Batch) -> str | None:
    n_errors = batch.counts.ended - batch.counts.completed
    return f"file-{batch.id}-errors" if batch.ended and n_errors else None


async def _batch_of_results(call: HttpExchange) -> Batch | None:
    """The batch whose results the requested file holds; None if the file was uploaded."""
    found = _RESULT_FILE.fullmatch(call.path_param)
    if found is None:
        return None
    try:
        return await call.queue.batch(call.principal.account, found[1])
    except NotFound:
        raise _no_such_file(call.path_param) from None


async def _result_lines(queue: Queue, batch: Batch, file_id: str) -> Chunks:
    """The results of the jobs that have ended, in the order of the batch's lines."""
    if batch.status == "validating" or batch.input_blob is None:
        return
    states = SUCCEEDED if file_id.endswith("-output") else NOT_SUCCEEDED
    async for result in batch_results(queue, batch, states):
        yield result_line(result, batch.endpoint)


async def _result_file_body(batches: BatchQueue, batch: Batch, file_id: str) -> Json:
    sizes, key = batches.result_sizes, (file_id, batch.counts.ended)
    if (size := sizes.get(key)) is None:
        size = sum([len(line) async for line in _result_lines(batches.queue, batch, file_id)])
        if len(sizes) >= _MAX_SIZES:
            sizes.clear()
        sizes[key] = size
    kind = "output" if file_id.endswith("-output") else "error"
    created_us = batch.ended_us or batch.created_us
    return _body(file_id, size, created_us, batch.expires_us, f"{batch.id}_{kind}.jsonl", "batch_output")


# --- uploads ----------------------------------------------------------------------------------------------------------


async def _upload(call: HttpExchange, form: MultipartForm) -> File:
    queue, account = call.queue, call.principal.account
    fields: dict[str, str] = {}
    name, blob = "", ""
    async for part in form:
        if part.name == "file":
            _check_first(not blob)
            name = _file_name(part)
            if "purpose" in fields:  # the usual order
                stored = await queue.files.add(account, name, _purpose(fields), form.content(), _expires_s(fields))
                return await _finish_upload(call, form, fields, stored)
            blob, _ = await queue.blobs.put_stream(form.content(), queue.limits.max_file_bytes)
        else:
            await _read_field(call, form, part, fields)
    if not blob:
        raise BadInput("the form has no part `file`", param="file")
    return await queue.files.add(account, name, _purpose(fields), queue.blobs.stream(blob), _expires_s(fields))


async def _finish_upload(call: HttpExchange, form: MultipartForm, fields: dict[str, str], stored: File) -> File:
    """Read the rest of the form; fields after the file may change its purpose or expiry."""
    files, account = call.queue.files, call.principal.account
    try:
        before = _purpose(fields), _expires_s(fields)
        async for part in form:
            _check_first(part.name != "file")
            await _read_field(call, form, part, fields)
        if (_purpose(fields), _expires_s(fields)) == before:
            return stored
        return await files.add(account, stored.name, _purpose(fields), files.content(stored), _expires_s(fields))
    except BaseException:
        await files.delete(account, stored.id)
        raise


async def _read_field(call: HttpExchange, form: MultipartForm, part: FormPart, fields: dict[str, str]) -> None:
    """Read a field of the form. The response names it if there is no such field."""
    fields[part.name] = await form.field(part)
    if part.name not in _FIELDS:
        call.unknown_form_fields += (part.name,)


def _check_first(is_first: bool) -> None:
    if not is_first:
        raise BadInput("the form has more than one file", param="file")


async def _deduplicate(call: HttpExchange, uploaded: File) -> Reply:
    """The content is known only after the upload: if the key was used before, the new file is deleted again."""
    files, keys, account = call.queue.files, call.queue.idempotency_keys, call.principal.account
    content = "\0".join((uploaded.blob, uploaded.name, uploaded.purpose))
    key, digest = call.headers[IDEMPOTENCY_KEY], blake2b(content.encode(), digest_size=16).digest()
    try:
        begun = await keys.begin(account, key, request_digest(call, digest), uploaded.id)
    except BaseException:
        await files.delete(account, uploaded.id)
        raise
    if isinstance(begun, StoredAnswer):
        await files.delete(account, uploaded.id)
        return Reply(200, begun.answer, headers=REPLAYED)
    answer = encode(_file_body(uploaded))
    await keys.finish(account, key, answer)
    return Reply(200, answer)


def _file_name(part: FormPart) -> str:
    if part.filename is None:
        raise BadInput("the part `file` has no `filename`", param="file")
    return part.filename.replace("\\", "/").rpartition("/")[2].replace("\0", "")[:MAX_NAME_CHARS] or "file"


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose")
    if purpose not in PURPOSES:
        problem = "is missing" if purpose is None else f"{purpose[:80]!r} is unknown"
        raise BadInput(f"`purpose` {problem}: it must be one of {', '.join(PURPOSES)}", param="purpose")
    return purpose


def _expires_s(fields: dict[str, str]) -> float | None:
    seconds = fields.get("expires_after[seconds]")
    if seconds is None:
        return None
    if fields.get("expires_after[anchor]") not in (None, "created_at"):
        raise BadInput("`expires_after.anchor` must be created_at", param="expires_after.anchor")
    return float(parse_int(seconds, "seconds", 3600, 30 * _DAY_S))


async def _find_file(call: HttpExchange) -> File:
    if not _UPLOADED_FILE.fullmatch(call.path_param):
        raise _no_such_file(call.path_param)
    try:
        return await call.queue.files.get(call.principal.account, call.path_param)
    except NotFound:
        raise _no_such_file(call.path_param) from None


def _no_such_file(file_id: str) -> NoSuchFile:
    return NoSuchFile(f"there is no file {file_id[:100]!r}: it never existed, was deleted or has expired", param="id")


def _file_body(file: File) -> Json:
    return _body(file.id, file.n_bytes, file.created_us, file.expires_us, file.name, file.purpose)


def _body(file_id: str, n_bytes: int, created_us: int, expires_us: int | None, name: str, purpose: str) -> Json:
    return {
        "id": file_id,
        "object": "file",
        "bytes": n_bytes,
        "created_at": created_us // 1_000_000,
        "expires_at": expires_us and expires_us // 1_000_000,
        "filename": name,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }
