"""Operations for the operator of the server, as the APIs of any of its processes offer them."""

from collections.abc import Mapping
from typing import Literal

from emberline.cluster.served_models import ServedModels
from emberline.protocol.errors import Unavailable
from emberline.service.core import Operations, PurgedTexts
from emberline.service.in_flight import InFlight
from emberline.service.models import Models
from emberline.telemetry.health import Health
from emberline.telemetry.status import Status, StatusQuery


class ServiceOperations:
    """The core's operations, with what this process knows: models by name, and that it drains."""

    def __init__(self, core: Operations, models: Models, served: ServedModels, in_flight: InFlight) -> None:
        self._core = core
        self._models = models
        self._served = served
        self._in_flight = in_flight

    async def health(self) -> Health:
        """State the server's health: bad without the core, and while draining, so that load balancers go elsewhere."""
        try:
            health = await self._core.health()
        except Unavailable as error:
            health = Health(False, {"core": error.message})
        is_draining = self._in_flight.is_draining
        return Health(health.ok and not is_draining, {**health.detail, "draining": is_draining})

    async def metrics(self) -> bytes:
        """Returns the metrics of the whole server in the Prometheus text format."""
        return await self._core.metrics()

    async def status(self, query: StatusQuery) -> Status:
        """Describe the whole server for its operator."""
        found = await self._core.status(query)
        found.ok &= not self._in_flight.is_draining
        return found

    async def refresh_prices(self) -> None:
        """Return once requests are charged at the prices that the store has now."""
        await self._core.refresh_prices()

    async def change_alias(self, name: str, targets: Mapping[str, int] | None) -> None:
        """Set an alias, or remove it; in effect in every HTTP worker once this returns, and after a restart."""
        if targets is not None:
            self._models.check_alias(name, targets)
        await self._core.change_alias(name, targets)

    async def purge(self, account: str | None, session: str | None) -> PurgedTexts:
        """Forget what the core remembers of the conversations of an account, of one of its sessions, or (None) of
        all."""
        return await self._core.purge(account, session)

    async def load_model(
        self, model: str, action: Literal["load", "unload"], keep_alive_s: float | None = None
    ) -> None:
        """Load or unload a model of ours; return when it is done. Raises ModelNotFound for a model of others."""
        if self._models.is_upstream(card := self._models.find(model, None)):
            raise self._served.not_found(card.id)
        await self._core.load_model(card.id, action, keep_alive_s)
