"""Engine workers that somebody else started, here or on other machines: `[[endpoints]]` of the kind "emberline"."""

from collections.abc import Iterable

from emberline.balancer.endpoint import Endpoint
from emberline.config import EndpointConfig
from emberline.protocol.errors import BadInput


def remote_workers(configured: Iterable[EndpointConfig]) -> list[Endpoint]:
    """Each serves one model, which must be named: we tokenise for it."""
    workers = []
    for config in configured:
        if config.kind != "emberline":
            continue
        if len(config.models) != 1:
            raise BadInput(f"endpoint {config.name}: name the one model that this worker serves in `models`")
        address = config.url.replace("://", ":", 1)
        endpoint = Endpoint(
            name=config.name, address=address, token=config.key or "", role=config.role, models=config.models
        )
        try:
            endpoint.split()
        except ValueError:
            raise BadInput(
                f"endpoint {config.name}: the url of a worker is tcp://host:port or unix:/path, not {config.url!r}"
            ) from None
        workers.append(endpoint)
    return workers
