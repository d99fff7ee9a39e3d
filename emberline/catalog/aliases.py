"""Aliases: other names of models, each with one target or with several by weight.

`gpt-4o` may stand for a local model, `@cf/moonshotai/kimi-k2.5` for a deployment, and a name with two targets moves its
users gradually from one model to another. A target may be an alias itself. Ids of models take precedence over aliases,
and aliases over the short names that model cards list.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from hashlib import blake2b
from typing import Annotated

import msgspec

from emberline.catalog.model_card import MODEL_ID, ModelCard
from emberline.protocol.errors import BadInput, Conflict, EmberlineError, NotFound
from emberline.store import Database
from emberline.store.notifications import Subscription

MAX_ALIASES = 1000
MAX_TARGETS = 16
MAX_CHAIN = 8  # aliases of aliases
CHANNEL = "model_aliases"
POLL_S = 15.0  # where a notification may be missed
_HASH_BYTES = 6  # below the 53 bits of a float
_log = logging.getLogger(__name__)

ModelName = Annotated[str, msgspec.Meta(max_length=256, pattern=f"^({MODEL_ID})$(?!\\n)")]
Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


Targets = Annotated[dict[ModelName, Weight], msgspec.Meta(min_length=1, max_length=MAX_TARGETS)]


class Alias(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: ModelName
    targets: Targets
    configured: bool = False  # in emberline.toml, where alone it can be changed


class AliasTable(msgspec.Struct, frozen=True, dict=True):
    """All aliases of a server, by their names in lower case. Sent to HTTP workers whenever it changes."""

    aliases: dict[str, Alias] = {}

    def pick(self, name: str, caller: str, is_served: Callable[[str], bool]) -> str:
        """The model that `name` stands for; a name that is no alias stands for itself.

        Equal callers get equal answers while the weights stay, and a change of the weights moves no more callers than
        it has to. Targets that are not served are left out. Without a caller: the target of the largest weight.
        """
        for _ in range(MAX_CHAIN):
            alias = self.aliases.get(name.lower())
            if alias is None:
                break
            targets = {
                target: weight
                for target, weight in alias.targets.items()
                if is_served(target) or any(map(is_served, self._reachable(target)))
            }
            name = _choose(alias.name, targets or alias.targets, caller)
        return name

    def leads_to(self, model: str) -> bool:
        """True if an alias stands for the model."""
        return model.lower() in self._names

    def names_of(self, card: ModelCard) -> tuple[str, ...]:
        """The aliases that may stand for the model."""
        wanted = dict.fromkeys(name.lower() for name in (card.id, *card.aliases))
        return tuple(dict.fromkeys(name for target in wanted for name in self._names.get(target, ())))

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        """The aliases that lead to each name in lower case: every request of a key with scopes asks."""
        names: dict[str, list[str]] = {}
        for alias in self.aliases.values():
            for target in self._reachable(alias.name):
                names.setdefault(target, []).append(alias.name)
        return names

    def changed(self, alias: Alias) -> "AliasTable":
        """With the alias added or replaced; BadInput where it would lead to itself, or too far."""
        new = AliasTable(self.aliases | {alias.name.lower(): alias})
        if len(new.aliases) > MAX_ALIASES:
            raise BadInput(f"there are {MAX_ALIASES} aliases already, which is the most", param="name")
        if alias.name.lower() in new._reachable(alias.name):
            raise BadInput(f"alias {alias.name} would point to itself", param="targets")
        if any(new._depth(name) > MAX_CHAIN for name in new.aliases):
            raise BadInput(f"more than {MAX_CHAIN} aliases would follow one another", param="targets")
        return new

    def without(self, name: str) -> "AliasTable":
        if name.lower() not in self.aliases:
            raise NotFound(f"there is no alias {name[:256]}", param="name")
        return AliasTable({key: alias for key, alias in self.aliases.items() if key != name.lower()})

    def _reachable(self, name: str) -> set[str]:
        """Names that an alias leads to, in lower case."""
        found, open_names = set[str](), [name.lower()]
        while open_names:
            alias = self.aliases.get(open_names.pop())
            targets = {target.lower() for target in alias.targets} - found if alias is not None else set()
            found |= targets
            open_names += targets
        return found

    def _depth(self, name: str) -> int:
        """Length of the longest chain of aliases from here. Call it only if there are no cycles."""
        level, depth = {name.lower()}, 0
        while level := {key for key in level if key in self.aliases}:
            level = {target.lower() for key in level for target in self.aliases[key].targets}
            depth += 1
        return depth


def _choose(name: str, targets: Mapping[str, int], caller: str) -> str:
    """Weighted rendezvous hashing: each target draws a number of its own for the caller, the lowest wins."""
    if len(targets) == 1 or not caller:
        return max(targets, key=lambda target: targets[target])

    def draw(target: str) -> float:
        digest = blake2b(f"{name}\0{target}\0{caller}".lower().encode(), digest_size=_HASH_BYTES).digest()
        return -math.log((int.from_bytes(digest) + 1) / (1 << 8 * _HASH_BYTES)) / targets[target]

    return min(targets, key=draw)


def configured_table(aliases: Mapping[str, Mapping[str, int]]) -> AliasTable:
    """The aliases of emberline.toml."""
    table = AliasTable()
    for name, targets in aliases.items():
        try:
            alias = msgspec.convert({"name": name, "targets": targets, "configured": True}, Alias)
            table = table.changed(alias)
        except (BadInput, msgspec.ValidationError) as error:
            raise BadInput(f"[aliases] {name[:256]!r} in emberline.toml: {error}") from None
    return table


_UPSERT = (
    "INSERT INTO model_aliases (name, alias, changed_us) VALUES (?, ?, ?)"
    " ON CONFLICT (name) DO UPDATE SET alias = excluded.alias, changed_us = excluded.changed_us"
)


class Aliases:
    """The table of one process. An HTTP worker's follows that of its core, a core's the database: other cores that
    share it may change aliases, too."""

    def __init__(self, configured: AliasTable | None = None, store: Database | None = None) -> None:
        self.table = self._configured = configured or AliasTable()
        self.on_change: Callable[[AliasTable], None] | None = None
        self._store = store
        self._changing = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None

    def follow(self, table: AliasTable) -> None:
        self.table = table

    async def start(self) -> None:
        """Read the stored aliases, and again whenever one may have changed."""
        assert self._store is not None
        subscription = self._store.listen(CHANNEL, POLL_S)
        await self.refresh()
        self._following = asyncio.create_task(self._follow(subscription))

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def refresh(self) -> None:
        """The configured aliases and the stored ones. One that has become impossible is left out."""
        assert self._store is not None
        async with self._changing:
            table = self._configured
            rows = await self._store.read("SELECT alias FROM model_aliases ORDER BY changed_us, name")
            for alias in _decoded(row[0] for row in rows):
                if alias.name.lower() not in table.aliases:
                    try:
                        table = table.changed(alias)
                    except BadInput:  # the configuration has changed meanwhile
                        continue
            self._set(table)

    async def change(self, name: str, targets: Mapping[str, int] | None) -> None:
        """Set an alias, or remove it (None), durably. BadInput, Conflict and NotFound say why it cannot be."""
        assert self._store is not None, "only the core changes aliases"
        async with self._changing:
            if name.lower() in self._configured.aliases:
                raise Conflict(f"alias {name} is in emberline.toml: change it there and restart", param="name")
            if targets is None:
                table = self.table.without(name)
                await self._store.write("DELETE FROM model_aliases WHERE name = ?", (name.lower(),))
            else:
                alias = Alias(name=name, targets=dict(targets))
                table = self.table.changed(alias)
                row = (name.lower(), msgspec.json.encode(alias).decode(), self._store.now_us())
                await self._store.write(_UPSERT, row)
            self._set(table)
        await self._store.notify(CHANNEL)

    def _set(self, table: AliasTable) -> None:
        changed, self.table = table != self.table, table
        if changed and self.on_change is not None:
            self.on_change(table)

    async def _follow(self, subscription: Subscription) -> None:
        async for _ in subscription:
            try:
                await self.refresh()
            except EmberlineError as error:
                _log.warning("aliases were not read: %s", error.message)
            except Exception:  # the next look may succeed
                _log.exception("aliases were not read")


async def open_aliases(store: Database, configured: Mapping[str, Mapping[str, int]]) -> Aliases:
    aliases = Aliases(configured_table(configured), store)
    await aliases.start()
    return aliases


def _decoded(rows: Iterable[object]) -> Iterable[Alias]:
    for row in rows:
        assert isinstance(row, str)
        yield msgspec.json.decode(row, type=Alias)
