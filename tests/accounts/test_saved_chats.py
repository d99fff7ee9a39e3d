"""Saved chats: kept per account, searched, renamed, bounded."""

import itertools
from collections.abc import AsyncIterator

import pytest

from emberline.accounts.saved_chats import MAX_WORDS, SavedChats
from emberline.protocol.errors import BadInput, Conflict, NotFound
from tests.databases import DatabaseLocation

DOCUMENT = b'{"format":"emberline.workspace"}'


@pytest.fixture
async def chats(database: DatabaseLocation) -> AsyncIterator[SavedChats]:
    store = await database.open()
    clock = itertools.count(1_000_000, 1_000_000)
    yield SavedChats(store, max_chats=3, max_bytes=1000, now_us=lambda: next(clock))
    await store.close()


async def titles(chats: SavedChats, account: str = "acme", words: str = "", after: str = "") -> list[str]:
    return [chat.title for chat in await chats.page(account, words, after, 10)]


async def test_a_chat_is_replaced_listed_and_deleted_by_its_account_only(chats: SavedChats) -> None:
    await chats.put("acme", "a", "First", "lighthouse", DOCUMENT)
    await chats.put("acme", "b", "Second", "tea", DOCUMENT)
    await chats.put("other", "a", "Theirs", "secret", b"{}")
    await chats.put("acme", "a", "First again", "harbour", b'{"n":2}')
    assert await titles(chats) == ["First again", "Second"]
    assert await titles(chats, after="a") == ["Second"]
    assert (await chats.get("acme", "a"))[1] == b'{"n":2}'
    assert await titles(chats, words="lighthouse") == []
    with pytest.raises(NotFound, match="saved no chat 'b'"):
        await chats.get("other", "b")
    with pytest.raises(NotFound):
        await chats.delete("other", "b")
    with pytest.raises(NotFound):
        await chats.rename("other", "b", "Mine")
    await chats.delete("acme", "b")
    assert await chats.delete_all("acme") == 1
    assert (await titles(chats), await titles(chats, "other")) == ([], ["Theirs"])


async def test_a_search_needs_every_word_and_takes_none_as_a_pattern(chats: SavedChats) -> None:
    await chats.put("acme", "a", "Śląskie ZAKŁADY", "100% of the harbour!", DOCUMENT)
    await chats.put("acme", "b", "Tea", "1000 leaves_of tea", DOCUMENT)
    found = {
        words: await titles(chats, words=words) for words in ("zakłady HARBOUR", "100%", "s_o", "r!", "zakłady tea")
    }
    assert found == {
        "zakłady HARBOUR": ["Śląskie ZAKŁADY"],
        "100%": ["Śląskie ZAKŁADY"],
        "s_o": ["Tea"],
        "r!": ["Śląskie ZAKŁADY"],
        "zakłady tea": [],
    }
    assert (await chats.rename("acme", "a", "Plan")).title == "Plan"
    assert (await titles(chats, words="plan"), await titles(chats, words="zakłady")) == (["Plan"], [])


async def test_an_account_has_room_for_so_many_chats_and_bytes(chats: SavedChats) -> None:
    for name in "abc":
        await chats.put("acme", name, name, "", DOCUMENT)
    with pytest.raises(Conflict, match="3 chats of 1,000 bytes in all"):
        await chats.put("acme", "d", "d", "", DOCUMENT)
    await chats.put("acme", "c", "c", "", b"1" * 900)
    with pytest.raises(Conflict, match="delete some"):
        await chats.put("acme", "b", "b", "", b"1" * 900)
    assert len((await chats.get("acme", "b"))[1]) == len(DOCUMENT), "what was refused changed nothing"
    await chats.put("other", "d", "d", "", b"1" * 900)


async def test_a_search_is_bounded_in_words_and_time(database: DatabaseLocation) -> None:
    store = await database.open()
    chats = SavedChats(store)
    with pytest.raises(BadInput, match=f"{MAX_WORDS} words"):
        await chats.page("acme", " ".join(map(str, range(MAX_WORDS + 1))), "", 10)
    for number in range(3):  # LIKE takes seconds: it begins to match at each place
        await chats.put("acme", f"c{number}", "a", "a" * (1 << 20), DOCUMENT)
    assert await chats.page("acme", "a" * 150 + "b", "", 10) == []
    assert len(await chats.page("acme", "a " * 40 + "a" * 150, "", 10)) == 3, "words said twice count once"
    with pytest.raises(BadInput, match="took more than 0 s"):
        await SavedChats(store, search_s=0.0).page("acme", "b", "", 10)
    await store.close()
