"""Saved chats of the caller's account: list and search, save, rename, delete."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from emberline.accounts.saved_chats import ChatSummary
from emberline.api.http.body import read_json
from emberline.api.http.exchange import JSON, HttpExchange, Reply, encode, json_reply, list_reply
from emberline.api.http.streaming import ByteStream, Chunks
from emberline.net.held_bodies import held_bodies
from emberline.protocol.errors import BadInput, TooLarge

MAX_DOCUMENT_BYTES = 16 << 20
MAX_TEXT_CHARS = 1 << 20  # that a search looks through; the page cuts longer ones
MAX_WORDS_CHARS = 200
MAX_LISTED = 100
_PIECE_BYTES = 256 << 10
PAGE = {
    "q": {"type": "string", "maxLength": MAX_WORDS_CHARS, "description": "words of the title or the messages"},
    "after": {"type": "string", "description": "the last chat of the page before"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
}

ChatId = Annotated[str, Meta(pattern="^[0-9A-Za-z_-]{1,64}$")]
Title = Annotated[str, Meta(min_length=1, max_length=200)]


class NewChat(msgspec.Struct, kw_only=True):
    """`document` is the page's own form of the chat, of at most 16 MiB; `text` is what a search looks through."""

    id: ChatId
    title: Title
    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARS)] = ""
    document: msgspec.Raw


class ChatChange(msgspec.Struct, kw_only=True):
    title: Title


async def put(call: HttpExchange) -> Reply:
    """Save a chat, or replace the one with this id."""
    chat = await read_json(call, NewChat)
    _check_title(chat.title)
    document = bytes(chat.document)
    if len(document) > MAX_DOCUMENT_BYTES:
        raise TooLarge(f"a saved chat may have {MAX_DOCUMENT_BYTES >> 20} MiB", param="document")
    saved = await call.accounts.chats.put(
        call.principal.account, chat.id, chat.title, chat.text.replace("\0", " "), document
    )
    return json_reply(_body(saved))


async def list_all(call: HttpExchange) -> Reply:
    """The latest first."""
    words, limit = call.query.get("q", ""), call.int_param("limit", 50, 1, MAX_LISTED)
    if len(words) > MAX_WORDS_CHARS:
        raise BadInput(f"`q` may have {MAX_WORDS_CHARS} characters", param="q")
    found = await call.accounts.chats.page(call.principal.account, words, call.query.get("after", ""), limit + 1)
    return list_reply([_body(chat) for chat in found[:limit]], has_more=len(found) > limit)


async def retrieve(call: HttpExchange) -> ByteStream:
    """The chat, in pieces: a client that reads slowly holds its document, which counts like a request's body."""
    chat, document = await call.accounts.chats.get(call.principal.account, call.path_param)
    held_bodies.add(call, len(document))
    head = encode(_body(chat)).removesuffix(b"}") + b',"document":'
    n_bytes = len(head) + len(document) + 1

    async def pieces() -> Chunks:
        yield head
        for at in range(0, len(document), _PIECE_BYTES):
            yield document[at : at + _PIECE_BYTES]
        yield b"}"

    return ByteStream(pieces(), JSON, headers=[(b"content-length", b"%d" % n_bytes)])


async def rename(call: HttpExchange) -> Reply:
    change = await read_json(call, ChatChange)
    _check_title(change.title)
    chat = await call.accounts.chats.rename(call.principal.account, call.path_param, change.title)
    return json_reply(_body(chat))


async def delete(call: HttpExchange) -> Reply:
    await call.accounts.chats.delete(call.principal.account, call.path_param)
    return json_reply({"id": call.path_param, "object": "chat", "deleted": True})


async def delete_all(call: HttpExchange) -> Reply:
    n = await call.accounts.chats.delete_all(call.principal.account)
    return json_reply({"object": "chat.deletion", "deleted": n})


def _check_title(title: str) -> None:
    if "\0" in title:  # which PostgreSQL takes in no text
        raise BadInput("`title` contains a NUL character", param="title")


def _body(chat: ChatSummary) -> dict[str, Any]:
    return {
        "id": chat.id,
        "object": "chat",
        "title": chat.title,
        "updated_at": chat.updated_us // 1_000_000,
        "bytes": chat.n_bytes,
    }
