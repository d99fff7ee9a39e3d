"""Errors as each API reports them: one table from an error's kind to HTTP statuses, codes and types."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from emberline.protocol.errors import BadInput, EmberlineError, NotFound

HeaderList = list[tuple[bytes, bytes]]

_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)")
_MESSAGE = re.compile(r"messages\[(\d+)\](.*)")
_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\]")
_OUTPUT = re.compile(r"output\b(.*)")
_TEXT = re.compile(r"texts(|\[\d+\])")


class Dialect(Enum):
    """The error format of a route. The enveloped forms add Cloudflare's `errors` to the API's own body."""

    NATIVE = "native"
    OPENAI = "openai"
    OPENAI_ENVELOPED = "openai+envelope"
    ANTHROPIC = "anthropic"
    ANTHROPIC_ENVELOPED = "anthropic+envelope"
    OLLAMA = "ollama"
    BINDING = "binding"  # of a Worker's `AI` binding, which throws it as an AiError
    GATEWAY = "gateway"  # AI Gateway's: an envelope with the key `error`


class MethodNotAllowed(EmberlineError):
    kind = "method_not_allowed"

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(f"Method {method} not available for that URI.")
        self.allowed = allowed


class UpgradeRequired(EmberlineError):
    """The path serves a WebSocket, and the request is no handshake."""

    kind = "upgrade_required"


class NoBody(BadInput):
    kind = "no_body"


class JsonModeFailed(EmberlineError):
    """The output had to be JSON and reached its token limit before the JSON was complete."""

    kind = "json_mode_failed"


class NoSuchResponse(NotFound):
    kind = "response_not_found"


class NoPreviousResponse(NotFound):
    kind = "previous_response_not_found"


class NoSuchBatch(NotFound):
    kind = "batch_not_found"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Under which names a client sent the fields of the canonical request.

    The service reports errors about `output`, `tools[2].parameters` or `messages[3]`; APIs call them differently.
    """

    output: str | None = None
    tools: Sequence[str] = ()  # of each canonical tool
    schema: str = "parameters"  # a tool's field for its schema
    messages: Sequence[str] = ()  # of each canonical message; empty: the names are the same
    # The fields of a canonical message's parts, by its number. None, or no entry: they are named like the message.
    parts: Mapping[int, Sequence[str]] | None = None
    texts: str = "texts"  # to encode
    one_text: bool = False  # the field is a text and no list

    def of(self, param: str) -> str:
        """The client's name of a canonical field; one without another name is returned unchanged."""
        if param == "tools" and self.tools:
            return self.tools[0].partition("[")[0]
        if self.output and (found := _OUTPUT.fullmatch(param)):
            return self.output + found[1]
        if (found := _TOOL.fullmatch(param)) and int(found[1]) < len(self.tools):
            return self.tools[int(found[1])] + re.sub(r"^\.parameters\b", f".{self.schema}", found[2])
        if self.parts and (found := _PART.fullmatch(param)):
            fields, number = self.parts.get(int(found[1]), ()), int(found[2])
            if number < len(fields):
                return fields[number]
        if (found := _MESSAGE.fullmatch(param)) and int(found[1]) < len(self.messages):
            return self.messages[int(found[1])]  # other fields inside a message have no counterpart
        if found := _TEXT.fullmatch(param):
            return self.texts + ("" if self.one_text else found[1])
        return param

    def rename(self, error: EmberlineError) -> EmberlineError:
        """`error` with the client's field name in `param` and in the message."""
        if error.param is not None and (name := self.of(error.param)) != error.param:
            error.message = error.message.replace(f"`{error.param}`", f"`{name}`")
            error.param = name
        return error


class Codes(NamedTuple):
    """HTTP status, codes and types of one kind of error. The native (Workers AI) status may differ."""

    status: int
    native_status: int
    native_code: int
    openai_type: str
    openai_code: str | None
    anthropic_type: str


_INVALID = "invalid_request_error"

CODES: dict[str, Codes] = {
    "internal": Codes(500, 500, 5001, "server_error", "internal_error", "api_error"),
    "prediction_failed": Codes(500, 500, 5001, "server_error", "prediction_failed", "api_error"),
    "bad_input": Codes(400, 400, 5006, _INVALID, None, _INVALID),
    "no_body": Codes(400, 400, 3003, _INVALID, None, _INVALID),
    "unsupported": Codes(400, 400, 5006, _INVALID, "unsupported_parameter", _INVALID),
    "json_mode_failed": Codes(400, 400, 5024, _INVALID, "json_mode_failed", _INVALID),
    "too_large": Codes(413, 413, 3006, _INVALID, "request_too_large", "request_too_large"),
    "context_exceeded": Codes(400, 413, 5021, _INVALID, "context_length_exceeded", _INVALID),
    "model_not_found": Codes(404, 400, 5007, _INVALID, "model_not_found", "not_found_error"),
    "malformed_model_id": Codes(404, 404, 3042, _INVALID, "model_not_found", "not_found_error"),
    "unauthorized": Codes(401, 401, 10000, _INVALID, "invalid_api_key", "authentication_error"),
    "forbidden": Codes(403, 403, 10000, "permission_error", "forbidden", "permission_error"),
    "not_found": Codes(404, 404, 7000, _INVALID, "unknown_url", "not_found_error"),
    "response_not_found": Codes(404, 404, 7000, _INVALID, "response_not_found", "not_found_error"),
    "previous_response_not_found": Codes(400, 400, 7000, _INVALID, "previous_response_not_found", _INVALID),
    "stream_not_found": Codes(404, 404, 7000, _INVALID, "stream_not_found", "not_found_error"),
    "webhook_not_found": Codes(404, 404, 7000, _INVALID, "webhook_not_found", "not_found_error"),
    "batch_not_found": Codes(404, 404, 7000, _INVALID, "batch_not_found", "not_found_error"),
    "file_not_found": Codes(404, 404, 7000, _INVALID, "file_not_found", "not_found_error"),
    "method_not_allowed": Codes(405, 405, 7001, _INVALID, "method_not_allowed", _INVALID),
    "upgrade_required": Codes(426, 426, 7001, _INVALID, "upgrade_required", _INVALID),
    "conflict": Codes(409, 409, 7003, _INVALID, "conflict", _INVALID),
    "idempotency_mismatch": Codes(422, 422, 5006, _INVALID, "idempotency_key_reused", _INVALID),
    "rate_limited": Codes(429, 429, 971, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "budget_exceeded": Codes(429, 429, 3036, "insufficient_quota", "insufficient_quota", "rate_limit_error"),
    "budget_reserved": Codes(429, 429, 3036, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "overloaded": Codes(429, 429, 3040, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error"),
    "unavailable": Codes(503, 503, 3040, "server_error", "unavailable", "overloaded_error"),
    "gateway_not_found": Codes(404, 404, 2001, _INVALID, "gateway_not_found", "not_found_error"),
    "provider_failed": Codes(502, 502, 2005, "server_error", "provider_failed", "api_error"),
    "provider_busy": Codes(429, 429, 2005, "rate_limit_error", "provider_busy", "rate_limit_error"),
    "invalid_provider": Codes(400, 400, 2008, _INVALID, "invalid_provider", _INVALID),
    "gateway_unauthorized": Codes(401, 401, 2009, _INVALID, "invalid_api_key", "authentication_error"),
    "provider_timeout": Codes(504, 504, 2014, "timeout_error", "provider_timeout", "timeout_error"),
    "prompt_blocked": Codes(400, 400, 2016, _INVALID, "prompt_blocked", _INVALID),
    "response_blocked": Codes(400, 400, 2017, _INVALID, "response_blocked", _INVALID),
    "deadline_exceeded": Codes(408, 408, 3007, "timeout_error", "timeout", "timeout_error"),
    "cancelled": Codes(408, 408, 3008, "timeout_error", "cancelled", "timeout_error"),
}

_GATEWAY_CODES = range(2001, 2100)  # AI Gateway's
# Kinds that never reached a model: Cloudflare's own wording, a null result and no request id in the message.
_ROUTING = frozenset({"unauthorized", "forbidden", "not_found", "method_not_allowed"})


def codes(error: EmberlineError) -> Codes:
    return CODES.get(error.kind, CODES["internal"])


def error_headers(error: EmberlineError, dialect: Dialect, request_id: str) -> tuple[int, HeaderList]:
    """The HTTP status and the headers of an error response."""
    row = codes(error)
    status = row.native_status if dialect in (Dialect.NATIVE, Dialect.BINDING) else row.status
    headers: HeaderList = []
    if error.kind == "budget_exceeded":
        headers.append((b"x-should-retry", b"false"))  # clients of OpenAI and Anthropic would retry at once
    if status in (429, 502, 503) and (error.kind != "budget_exceeded" or error.retry_after_s is not None):
        wait_s = 1.0 if error.retry_after_s is None else error.retry_after_s
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        headers.append((b"retry-after-ms", b"%d" % max(1, math.ceil(wait_s * 1000))))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, UpgradeRequired):
        headers += [(b"upgrade", b"websocket"), (b"connection", b"upgrade")]
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    if error.kind not in _ROUTING:
        headers.append((b"cf-ai-req-id", request_id.encode()))
    if dialect in (Dialect.ANTHROPIC, Dialect.ANTHROPIC_ENVELOPED):
        headers.append((b"request-id", request_id.encode()))
    return status, headers


def error_body(error: EmberlineError, dialect: Dialect, request_id: str) -> dict[str, Any]:
    """The JSON object of an error response, and of the error event that ends a started stream."""
    if dialect is Dialect.NATIVE:
        return _envelope(error, request_id)
    if dialect is Dialect.BINDING:
        return _ai_error(error, request_id)
    if dialect is Dialect.OLLAMA:
        return {"error": error.message}
    if dialect is Dialect.GATEWAY:
        code = 2009 if error.kind in ("unauthorized", "forbidden") else codes(error).native_code
        errors = [{"code": code, "message": error.message}]
        return {"success": False, "result": [], "messages": [], "error": errors}
    row = codes(error)
    ours = {"gateway_code": row.native_code} if row.native_code in _GATEWAY_CODES else {}
    body: dict[str, Any]
    if dialect in (Dialect.OPENAI, Dialect.OPENAI_ENVELOPED):
        fields = {"message": error.message, "type": row.openai_type, "param": error.param, "code": row.openai_code}
        body = {"error": fields | ours}
    else:
        fields = {"type": row.anthropic_type, "message": error.message}
        body = {"type": "error", "error": fields | ours, "request_id": request_id}
    if dialect in (Dialect.OPENAI_ENVELOPED, Dialect.ANTHROPIC_ENVELOPED):
        body |= _envelope(error, request_id)
    return body


def _envelope(error: EmberlineError, request_id: str) -> dict[str, Any]:
    message = error.message
    if error.kind == "unauthorized":
        message = "Authentication error"
    elif isinstance(error, BadInput):
        message = f"AiError: Bad input: {message} ({request_id})"
    elif error.kind not in _ROUTING:
        message = f"AiError: {message} ({request_id})"
    errors = [{"message": message, "code": codes(error).native_code}]
    return {"errors": errors, "success": False, "result": None if error.kind in _ROUTING else {}, "messages": []}


def _ai_error(error: EmberlineError, request_id: str) -> dict[str, Any]:
    """`description` is what the binding's error says; its method `models` reads `errors` instead."""
    row, envelope = codes(error), _envelope(error, request_id)
    return {
        "name": "AiError",
        "internalCode": row.native_code,
        "httpCode": row.native_status,
        "message": envelope["errors"][0]["message"],
        "description": error.message,
        "requestId": request_id,
        **envelope,
    }
