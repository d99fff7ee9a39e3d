"""What the doors need of the service behind them: the seam where tests put a scripted one."""

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from emberline.protocol.events import TextEvent
from emberline.protocol.request import GenerateRequest, Principal

if TYPE_CHECKING:  # a door needs the service's shape, not its imports
    from emberline.catalog.model_card import ModelCard
    from emberline.service.health import Health
    from emberline.service.responses import ResponseStore
    from emberline.upstream.relay import Relay

Events = AsyncGenerator[TextEvent, None]


class Backend(Protocol):
    @property
    def relay(self) -> "Relay | None":
        """Of models on other people's servers, if there are any."""

    def relayed(self, model_id: str) -> "ModelCard | None":
        """The card of such a model."""

    @property
    def responses(self) -> "ResponseStore": ...

    def generate(self, request: GenerateRequest, principal: Principal) -> Events: ...

    async def count_tokens(self, request: GenerateRequest, principal: Principal) -> int: ...

    def models(self) -> "Sequence[ModelCard]": ...

    def resolve(self, model_id: str) -> "ModelCard": ...

    async def health(self) -> "Health": ...

    async def metrics(self) -> bytes: ...
