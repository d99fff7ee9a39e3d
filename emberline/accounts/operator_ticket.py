"""Operator tickets: an admin's credential for a minute, made by whoever can read the root secret.

With them the command line on a server's own machine needs no key.
"""

import re
from hashlib import blake2b
from hmac import compare_digest

from emberline.accounts.secret import Secret

OPERATOR = "operator"  # the key id of whoever has a ticket
VALID_S = 60  # either side of the time in it
TICKET_PREFIX = "ember-operator."
_TICKET = re.compile(re.escape(TICKET_PREFIX) + r"([0-9]{1,12})\.[0-9a-f]{64}")


def operator_ticket(secret: Secret, now_s: int) -> str:
    mac = blake2b(str(now_s).encode(), key=secret.derive("operator", size=32), digest_size=32).hexdigest()
    return f"{TICKET_PREFIX}{now_s}.{mac}"


def is_operator_ticket(secret: Secret, ticket: str, now_s: float) -> bool:
    found = _TICKET.fullmatch(ticket)
    if found is None or abs(now_s - int(found[1])) > VALID_S:
        return False
    return compare_digest(ticket, operator_ticket(secret, int(found[1])))
