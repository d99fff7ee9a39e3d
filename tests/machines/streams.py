"""Streamed requests to a core, many at once, as a client on another machine sees them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from tests.cluster_processes import ADMIN, CoreProcess
from tests.soak.streams_client import StreamRecord


async def stream(
    core: CoreProcess, model: str, n_tokens: int, key: str = ADMIN, record: StreamRecord | None = None, **more: Any
) -> StreamRecord:
    """A chat to its end. Not retried: a refusal, too, is recorded as a problem. A given record is filled meanwhile."""
    record = record or StreamRecord()
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": n_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }
    await follow(core, "/v1/chat/completions", body, record, key)
    return record


async def follow(core: CoreProcess, path: str, body: dict[str, Any], record: StreamRecord, key: str = ADMIN) -> None:
    """Fills the record while the reply comes."""
    where = urlsplit(core.url)
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {where.netloc}\r\nauthorization: Bearer {key}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    writer = None
    try:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(head.encode() + raw)
        status = int((await reader.readline()).split()[1])
        while (line := await reader.readline()).strip():
            if line.lower().startswith(b"x-request-id:"):
                record.request_id = line.partition(b":")[2].strip().decode()
        if status != 200:
            record.problem = f"{status}: {(await reader.read())[:500]!r}"
            return
        before_s = time.monotonic()
        async for event in _events(reader):
            now_s = time.monotonic()
            record.silence_s, before_s = max(record.silence_s, now_s - before_s), now_s
            record.add(event)
    except (OSError, EOFError, IndexError) as error:
        record.broke, record.problem = True, f"the connection broke: {error!r}"
    else:
        if not record.n_done and not record.problem:
            record.broke, record.problem = True, "the stream ended without [DONE]"
    finally:
        if writer is not None:
            writer.close()


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The data of server-sent events in a chunked body."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                yield line[6:].strip().decode()


def cut_or_failed(records: list[StreamRecord], expected: StreamRecord) -> list[str]:
    """What is wrong with replies that all ought to be the expected one."""
    found = []
    for record in records:
        whole = record.texts == expected.texts and record.finishes == expected.finishes and record.n_done == 1
        if record.problem or not whole or _n_tokens(record) != _n_tokens(expected):
            found.append(
                record.problem or f"garbled: {record.finishes} {record.usage} {record.texts.get(0, '')[-80:]!r}"
            )
    return found


def _n_tokens(record: StreamRecord) -> list[tuple[int, int]]:
    return [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in record.usage]
