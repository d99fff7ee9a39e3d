"""Chats that people save on the server, per account: the playground lists, searches, renames and deletes them.

A chat is a document of the page that saved it, which the server does not read. A title and the text that searches look
through are kept with it. A saved chat replaces the one with the same id, whichever tab was last.
"""

import time
from collections.abc import Callable

import msgspec

from emberline.protocol.errors import BadInput, Conflict, NotFound
from emberline.protocol.sizes import format_limit
from emberline.store import Database, Query, Transaction
from emberline.store.database import SEARCH_S, Value, decode_row, search_rows

MAX_CHATS = 2000  # of an account
MAX_BYTES = 256 << 20  # of all chats of an account
MAX_WORDS = 16  # of a search: each may read all texts

_COLUMNS = "id, title, updated_us, n_bytes"


class ChatSummary(msgspec.Struct, frozen=True):
    id: str
    title: str
    updated_us: int
    n_bytes: int


class SavedChats:
    """The saved chats of all accounts, in the core's database."""

    def __init__(
        self,
        store: Database,
        max_chats: int = MAX_CHATS,
        max_bytes: int = MAX_BYTES,
        search_s: float = SEARCH_S,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        """`max_chats` and `max_bytes` bound the chats of each account, `search_s` the time of a search."""
        self._store = store
        self._max_chats = max_chats
        self._max_bytes = max_bytes
        self._search_s = search_s
        self._now_us = now_us

    async def put(self, account: str, chat_id: str, title: str, text: str, document: bytes) -> ChatSummary:
        """Save a chat under an id that its page chose. Raises Conflict if the account may store no more."""
        folded_text = text.casefold()  # which may have three times the bytes
        size = len(document) + len(folded_text.encode())

        def replaced() -> Transaction[ChatSummary]:
            ((n_chats, n_bytes),) = yield Query(
                "SELECT COUNT(*), SUM(n_bytes) FROM saved_chats WHERE account = ? AND id <> ?", (account, chat_id)
            )
            if int(n_chats or 0) >= self._max_chats or int(n_bytes or 0) + size > self._max_bytes:
                most = format_limit(self._max_bytes)
                raise Conflict(f"an account may save {self._max_chats} chats of {most} in all: delete some")
            rows = yield Query(
                f"""
                INSERT INTO saved_chats (account, id, title, folded_title, updated_us, n_bytes, folded_text, document)
                VALUES (?, ?, ?, ?, ?, ?, ?, ?)
                ON CONFLICT (account, id) DO UPDATE SET title = excluded.title, folded_title = excluded.folded_title,
                    updated_us = excluded.updated_us, n_bytes = excluded.n_bytes, folded_text = excluded.folded_text,
                    document = excluded.document
                RETURNING {_COLUMNS}
                """,
                (account, chat_id, title, title.casefold(), self._now_us(), size, folded_text, document),
            )
            return decode_row(ChatSummary, _COLUMNS, rows[0])

        return await self._store.run(replaced)

    async def get(self, account: str, chat_id: str) -> tuple[ChatSummary, bytes]:
        """The chat and its document. Raises NotFound."""
        rows = await self._store.read(
            f"SELECT {_COLUMNS}, document FROM saved_chats WHERE account = ? AND id = ?", (account, chat_id)
        )
        if not rows:
            raise _no_chat(chat_id)
        *summary, document = rows[0]
        assert isinstance(document, bytes)
        return decode_row(ChatSummary, _COLUMNS, tuple(summary)), document

    async def page(self, account: str, words: str, before: str, limit: int) -> list[ChatSummary]:
        """Chats with all `words` in their title or text, the latest first. `before` is the id of the last chat of the
        previous page, or empty. Raises BadInput if there are too many words, or the search takes too long."""
        terms = list(dict.fromkeys(words.casefold().split()))
        if len(terms) > MAX_WORDS:
            raise BadInput(f"a search may have {MAX_WORDS} words", param="q")
        where, values = "account = ?", [account]
        for term in terms:  # LIKE would take a second for 1 MiB of "aaa…" and a term that begins like it
            where += " AND (replace(folded_title, ?, '') <> folded_title OR replace(folded_text, ?, '') <> folded_text)"
            values += [term, term]
        if before:
            where += " AND (updated_us, id) < (SELECT updated_us, id FROM saved_chats WHERE account = ? AND id = ?)"
            values += [account, before]
        sql = f"SELECT {_COLUMNS} FROM saved_chats WHERE {where} ORDER BY updated_us DESC, id DESC LIMIT ?"
        params: tuple[Value, ...] = (*values, limit)
        rows = await (search_rows(self._store, sql, params, self._search_s) if terms else self._store.read(sql, params))
        return [decode_row(ChatSummary, _COLUMNS, row) for row in rows]

    async def rename(self, account: str, chat_id: str, title: str) -> ChatSummary:
        """Give a chat another title. Raises NotFound if there is no such chat."""
        rows = await self._store.write(
            f"UPDATE saved_chats SET title = ?, folded_title = ? WHERE account = ? AND id = ? RETURNING {_COLUMNS}",
            (title, title.casefold(), account, chat_id),
        )
        if not rows:
            raise _no_chat(chat_id)
        return decode_row(ChatSummary, _COLUMNS, rows[0])

    async def delete(self, account: str, chat_id: str) -> None:
        """Raises NotFound if there is no such chat."""
        sql = "DELETE FROM saved_chats WHERE account = ? AND id = ? RETURNING id"
        if not await self._store.write(sql, (account, chat_id)):
            raise _no_chat(chat_id)

    async def delete_all(self, account: str) -> int:
        """Delete every chat of an account. Returns their number."""
        return len(await self._store.write("DELETE FROM saved_chats WHERE account = ? RETURNING id", (account,)))


def _no_chat(chat_id: str) -> NotFound:
    return NotFound(f"this account has saved no chat {chat_id!r}", param="id")
