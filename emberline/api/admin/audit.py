"""Endpoints for operators: the audit log and its verification."""

from typing import Any

import msgspec

from emberline.accounts.audit_log import MAX_PAGE, AuditEntry
from emberline.api.http.exchange import HttpExchange, Reply, json_reply

PAGE = {
    "before": {"type": "integer", "minimum": 1},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
}
HEAD = {"head": {"type": "string"}}


async def entries(call: HttpExchange) -> Reply:
    """The latest first; `before` is the number of an entry."""
    limit = call.int_param("limit", 100, 1, MAX_PAGE)
    before = call.int_param("before", 1, 1, 10**12 - 1) if "before" in call.query else None
    found = await call.accounts.audit.entries(before=before, limit=limit + 1)
    rows = [_entry_body(entry) for entry in found[:limit]]
    return json_reply({"object": "list", "data": rows, "has_more": len(found) > limit})


async def verify(call: HttpExchange) -> Reply:
    """Walks the whole log. `head`: of an earlier verification, to find out whether the end was cut off since."""
    found = await call.accounts.audit.verify(call.query.get("head", ""))
    intact = not found.problem
    return json_reply(
        {"intact": intact, "problem": found.problem or None, "entries": found.n_entries, "head": found.head}
    )


def _entry_body(entry: AuditEntry) -> dict[str, Any]:
    return {
        "number": entry.number,
        "at": entry.at_us / 1e6,
        "actor": entry.actor,
        "source": entry.source,
        "act": entry.act,
        "target": entry.target,
        "details": msgspec.Raw(entry.details.encode()),
        "digest": entry.digest.hex(),
    }
