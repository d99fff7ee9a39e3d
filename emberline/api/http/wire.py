"""A JSON request body as it came: its top level is read once, the rest only by those who need it.

A request that is relayed is read no further than its top level and its messages; what it is made of is sent on as it
came. A request that is served here is decoded as a whole.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Raw

from emberline.api.http.decode_errors import explain
from emberline.api.http.errors import NoBody
from emberline.api.http.unknown_fields import declared_fields, has_nested_fields, unknown_fields
from emberline.protocol.errors import BadInput, TooLarge
from emberline.protocol.request import session_name

T = TypeVar("T")
Struct = TypeVar("Struct", bound=msgspec.Struct)

MAX_VALUES = 1 << 18  # of one request's JSON: a prompt of as many token ids, or far more messages than any client sends
NO_LIMIT = 32 << 20  # of values, of which a body has no more than bytes: its parts are decoded and limited one by one
SCAN_BYTES = 256 << 10  # of a body, looked at together
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors of a body that cannot be decoded
SESSION_FIELDS = ("prompt_cache_key", "user")  # of a body's session in the OpenAI API, by precedence
_NULL = Raw(b"null")


class _Metadata(msgspec.Struct):
    """The field of Anthropic's API that names a session."""

    user_id: str | None = None


_fields = msgspec.json.Decoder(dict[str, Raw])
_text = msgspec.json.Decoder(str)
_metadata = msgspec.json.Decoder(_Metadata)
_encode = msgspec.json.Encoder().encode


class Wire:
    """The body of a request, `raw`, and its top level, `fields`.

    `fields` is empty if the body is no JSON object, or has more values than a request may have: `decode` tells then
    what is wrong with it. Of a name that occurs twice, the last value counts. `unknown` names the fields that were
    ignored when the body was decoded.
    """

    __slots__ = ("fields", "raw", "unknown")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.unknown: tuple[str, ...] = ()
        self.fields: dict[str, Raw] = {}
        try:
            if not has_more_values(raw, MAX_VALUES):
                self.fields = _fields.decode(raw)
        except UNREADABLE:
            pass

    @property
    def model(self) -> str | None:
        """The model that the body names. What is wrong with a body without one, or with one that cannot be read, is
        reported where it is decoded."""
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
                    session = _metadata.decode(value).user_id if name == "metadata" else _text.decode(value)
                except UNREADABLE:
                    continue
                if session:
                    return session_name(session)
        return None

    def decode(self, decoder: msgspec.json.Decoder[T]) -> T:
        """Decode the whole body. Raises BadInput, which names the field that is wrong."""
        if not self.fields:
            return decode(self.raw, decoder)
        raw, kind = self.raw, cast(Any, decoder.type)
        if has_nested_fields(kind):
            try:  # one pass for both: the check for unknown fields needs all names
                values = msgspec.json.decode(raw)
                found: T = msgspec.convert(values, kind, str_keys=True)
                self.unknown = unknown_fields(values, kind)
                return found
            except UNREADABLE:
                pass
        found = _decode(raw, decoder)  # tells what is wrong
        self.ignore_all_but(kind)
        return found

    def ignore_all_but(self, kind: Any) -> None:
        """Note which fields the struct `kind` does not have: the response names them."""
        self.unknown = unknown_fields(self.fields, kind)

    def decode_fields(self, decoder: msgspec.json.Decoder[Struct]) -> Struct:
        """Decode the fields of the decoder's struct, without reading those that the struct declares as Raw; the others
        are sent on to another server.

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
            raise problem(bad, decoder.type) from None
        for name in unread:
            setattr(found, name, self.fields[name])
        return found

    def _without_raw(self, struct: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
        """The body with only the fields of `struct`, null for those that are Raw there; and the names of the latter."""
        declared, unread = declared_fields(struct), []
        small: dict[str, Raw] = {}
        for name, value in self.fields.items():
            if (is_raw := declared.get(name)) is not None:
                small[name] = _NULL if is_raw else value
                if is_raw:
                    unread.append(name)
        return _encode(small), unread


# --- the whole body ---------------------------------------------------------------------------------------------------


def decode(body: bytes, decoder: msgspec.json.Decoder[T], max_values: int = MAX_VALUES) -> T:
    """Decode a body as the decoder's type. Raises BadInput, which names the field that is wrong."""
    if not body:
        raise NoBody("the request has no body; send a JSON object")
    if has_more_values(body, max_values):
        raise TooLarge(f"the JSON has more than {max_values:,} values; send fewer or smaller lists and objects")
    return _decode(body, decoder)


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode a body whose number of values was checked."""
    try:
        if not body.isascii():
            str(body, "utf-8")  # msgspec does not validate the strings of fields that it skips
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as bad:
            return convert(body, decoder, bad, {})
    except UNREADABLE as bad:
        raise problem(bad, decoder.type) from None


def problem(bad: Exception, kind: Any = None) -> BadInput:
    """Explain to the client why a body of the type `kind` cannot be decoded, by one of the UNREADABLE errors."""
    if isinstance(bad, msgspec.ValidationError):
        message, field = explain(str(bad), kind=kind)
        return BadInput(message, param=field)
    if isinstance(bad, UnicodeDecodeError):
        return BadInput(f"the body is not valid UTF-8: {bad.reason} at byte {bad.start}")
    if isinstance(bad, RecursionError):
        return BadInput("the JSON is nested too deeply")
    return BadInput(f"the body is not valid JSON: {bad}")


def convert(
    body: bytes, decoder: msgspec.json.Decoder[T], bad: msgspec.ValidationError, unread: Mapping[str, Raw]
) -> T:
    """Decode a body that failed with `bad` once more, with 1.0 read as 1: some languages have one kind of number.

    `unread` are fields to put in place of the body's. Raises `bad` if it is about something else."""
    if "got `float`" not in str(bad):
        raise bad
    values = _whole_floats.decode(body)
    return msgspec.convert({**values, **unread} if unread else values, decoder.type)


def _number(text: str) -> int | float:
    """Read 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1 << 53 else value


_whole_floats = msgspec.json.Decoder(float_hook=_number)


def has_more_values(body: bytes, most: int, scan_bytes: int = SCAN_BYTES) -> bool:
    """True if the JSON has more than about `most` values, judged by the commas and brackets outside its strings.

    Linear, and without decoding: values cost far more time and memory than the bytes of a long text.
    """
    if len(body) <= most or n_separators(body) <= most:  # also those inside strings: an upper bound
        return False
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    inside, n_found, n_quotes = False, 0, 0
    for at in range(0, len(unescaped), scan_bytes):
        parts = unescaped[at : at + scan_bytes].split(b'"')
        n_found += n_separators(b" ".join(parts[inside::2]))
        n_quotes += len(parts) - 1
        inside ^= len(parts) % 2 == 0
        if n_found > most or n_quotes > 4 * (most + 1):  # a separator has at most a key and a text
            return True
    return False


def n_separators(body: bytes) -> int:
    return len(body) - len(body.translate(None, b",[{"))  # unlike bytes.count, as fast where there are many


class _Named(msgspec.Struct):
    model: Any = None


_named = msgspec.json.Decoder(_Named)


def named_model(body: bytes) -> str | None:
    """The model that a body names. What is wrong with a body without one is reported where it is decoded in full."""
    try:
        name = _named.decode(body).model
    except UNREADABLE:
        return None
    return name if isinstance(name, str) else None
