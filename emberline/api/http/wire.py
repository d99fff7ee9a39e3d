"""A JSON request body as it came: its top level is read once, the rest only by those who need it.

A request that is relayed is read no further than its top level and its messages; what it is made of is sent on as it
came. A request that is served here is decoded as a whole.
"""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import Raw

from emberline.api.http.body import (
    MAX_VALUES,
    UNREADABLE,
    convert,
    decode,
    has_more_values,
    named_model,
    problem,
    read_body,
)
from emberline.api.http.exchange import HttpExchange
from emberline.protocol.request import session_name

T = TypeVar("T")
Struct = TypeVar("Struct", bound=msgspec.Struct)

SESSION_FIELDS = ("prompt_cache_key", "user")  # of a body's session in the OpenAI API, by precedence
_NULL = Raw(b"null")


class _Metadata(msgspec.Struct):
    """The field of Anthropic's API that names a session."""

    user_id: str | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)
_session: msgspec.json.Decoder[str | _Metadata] = msgspec.json.Decoder(str | _Metadata)
_encode = msgspec.json.Encoder().encode


class Wire:
    """The body of a request, `raw`, and its top level, `fields`.

    `fields` is empty if the body is no JSON object, or has more values than a request may have: `decode` tells then
    what is wrong with it. Of a name that occurs twice, the last value counts.
    """

    __slots__ = ("fields", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.fields: dict[str, Raw] = {}
        try:
            if not has_more_values(raw, MAX_VALUES):
                self.fields = _fields.decode(raw)
        except UNREADABLE:
            pass

    @property
    def model(self) -> str | None:
        """The model that the body names. What is wrong with a body without one is reported where it is decoded."""
        if not self.fields:
            return named_model(self.raw)
        try:
            return _text.decode(self.fields.get("model", b""))
        except UNREADABLE:
            return None

    def use_model(self, name: str) -> None:
        """Replace the name of the model."""
        self.fields["model"] = Raw(_encode(name))
        self.raw = _encode(self.fields)

    def session(self, names: Sequence[str]) -> str | None:
        """The session id: the first of the fields `names` that has one."""
        for name in names:
            if (value := self.fields.get(name)) is not None:
                try:
                    found = _session.decode(value)
                except UNREADABLE:
                    continue
                if session := found if isinstance(found, str) else found.user_id:
                    return session_name(session)
        return None

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the whole body. Raises BadInput, which names the field that is wrong."""
        return decode(self.raw, decoder)

    def decode_fields(self, decoder: msgspec.json.Decoder[Struct]) -> Struct:
        """Decode the fields of the decoder's struct, without reading those that the struct declares as Raw.

        Raises BadInput, which names the field that is wrong."""
        if not self.fields:
            return self.decode(decoder)
        small, unread = self._without_raw(decoder.type)
        try:
            if not self.raw.isascii():
                str(self.raw, "utf-8")  # fields that are not decoded are sent on
            try:
                found = decoder.decode(small)
            except msgspec.ValidationError as bad:
                return convert(small, decoder, bad, {name: self.fields[name] for name in unread})
        except UNREADABLE as bad:
            raise problem(bad) from None
        for name in unread:
            setattr(found, name, self.fields[name])
        return found

    def _without_raw(self, struct: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
        """The body with only the fields of `struct`, null for those that are Raw there; and the names of the latter."""
        declared, unread = _declared(struct), []
        small: dict[str, Raw] = {}
        for name, value in self.fields.items():
            if (is_raw := declared.get(name)) is not None:
                small[name] = _NULL if is_raw else value
                if is_raw:
                    unread.append(name)
        return _encode(small), unread


@cache
def _declared(struct: type[msgspec.Struct]) -> dict[str, bool]:
    """Names of a struct's fields; True for those that are Raw."""
    return {field.encode_name: field.type is Raw for field in msgspec.structs.fields(struct)}


async def read_wire(exchange: HttpExchange, session_fields: Sequence[str] = SESSION_FIELDS) -> Wire:
    """Read a JSON body. Sets the model and the session of the exchange; refuses an unknown model.

    `session_fields` are the body's names of its session, by precedence.
    """
    wire = exchange.wire
    if wire is None:
        wire = exchange.wire = Wire(await read_body(exchange))
    exchange.session = exchange.header_session or wire.session(session_fields)
    model = wire.model
    if model is not None:
        exchange.named_model = model
        exchange.use_model(model)
    return wire
