"""A request on its way to one of other people's servers."""

from dataclasses import dataclass, field
from typing import Any

from emberline.catalog.card import ModelCard
from emberline.protocol.principal import Principal
from emberline.protocol.request import Priority
from emberline.service.clock import Clock
from emberline.service.errand import Errand

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Parcel:
    id: str
    card: ModelCard
    principal: Principal
    path: str  # CHAT or COMPLETIONS
    fields: dict[str, Any]  # the body; large values are `msgspec.Raw`
    keys: bytes  # content keys of the prompt
    input_tokens: int  # an estimate until the server says
    stream: bool = True
    hides_usage: bool = False  # the client has not asked for what we need
    n: int = 1
    max_tokens: int = 0
    priority: Priority = Priority.DEFAULT
    session: str | None = None
    reject_if_busy: bool = False
    deadline_s: float | None = None
    errand: Errand | None = None
    clock: Clock = field(default_factory=Clock)
