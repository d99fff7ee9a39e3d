"""The one pipeline from a canonical request to text events, for every API, jobs and the command line.

Opening one (the process that is the core; it owns the store, sessions, admission, metrics):

    served = [Served(card, text_model, endpoints=(Endpoint(name="m0", address="unix:/run/m0.sock", token=token),))]
    service = await open_service(served, data_dir=data_dir)     # connects to the engines in the background
    await service.ready(timeout_s=30)                           # optional: waits until every engine is connected
    ...
    await service.drain(limit_s=20)                             # refuses new work, waits for what runs
    await service.close()

More HTTP workers: the core also does `server = await open_core_server(service, socket_path)` (and, before it closes the
service, `await server.close()`); every HTTP worker does `service = await open_http_worker(served, core_socket=path)`.
Its service has the same methods and receives token frames straight from the engines.

A service:

    service.run(Work(task, principal))              # events of any task; aclose() cancels the work in the engine
    await service.count_tokens(request, principal) -> int
    service.responses                               # stored responses: put, get, delete
    service.models.cards() -> list[ModelCard]
    service.models.find(name, account) -> ModelCard # raises ModelNotFound, MalformedModelId
    await service.operations.health() -> Health     # .ok: tokens can move; .detail: plain data, per engine
    await service.operations.metrics() -> bytes     # Prometheus text

`request.id` is made by the API, unique for ever: the usage row is keyed by it. Never take it from a client.
`emberline.accounts.auth.Authenticator` makes the `Principal`.
"""

from emberline.cluster.served_models import Served
from emberline.service.service import Service
from emberline.service.service_factory import open_core_server, open_http_worker, open_service
from emberline.telemetry.health import Health

__all__ = ["Health", "Served", "Service", "open_core_server", "open_http_worker", "open_service"]
