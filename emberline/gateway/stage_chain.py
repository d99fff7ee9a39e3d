"""The stages that a gateway puts around the requests of one HTTP request: log, guardrails, response cache.

Every attempt passes the pipeline once: admission, limits, prices and the usage row are the pipeline's. What differs for
the caller is which model answers, and that one log row says all about it.
"""

from typing import Protocol

from emberline.gateway.cache_stage import CacheStage
from emberline.gateway.gateways import GatewayService
from emberline.gateway.guard_stage import GuardStage
from emberline.gateway.log_stage import LogStage
from emberline.gateway.rules import GatewayRules
from emberline.protocol.errors import EmberlineError
from emberline.protocol.gateway import GatewayOptions
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest, Principal
from emberline.service.models import ModelLookup
from emberline.service.work import Stage, TaskRunner, Work


class ModelService(TaskRunner, Protocol):
    """The service as a gateway uses it."""

    @property
    def models(self) -> ModelLookup: ...


class StageChain:
    """Made by `open_chain`. Most HTTP requests make one request; `completions` may make several at once."""

    def __init__(self, rules: GatewayRules, runner: TaskRunner, log_id: str) -> None:
        self.rules = rules
        self._runner = runner  # runs moderation models
        self._log_id = log_id
        self._n_requests = 0
        self._stages: list[Stage] = []  # of the last request, without its cache
        self._log: LogStage | None = None  # of the last request
        self._shown: LogStage | None = None  # whose row the headers tell of

    def apply(self, work: Work) -> None:
        """Put the gateway's stages around a request. A step of a universal request goes on with the row of the last."""
        rules, task = self.rules, work.task
        log = self._log
        if log is None or not log.is_open:
            log_id = self._log_id if not self._n_requests else f"{self._log_id}-{self._n_requests + 1}"
            self._n_requests += 1
            log = self._log = LogStage(rules, log_id, task)
            self._shown = self._shown or log
            self._stages = [log]
            if rules.settings.guardrails:
                guard = GuardStage(rules.settings, rules.models, self._runner, rules.principal, task.id, log.flags)
                self._stages.append(guard)
        work.own_key = rules.own_key
        work.stages = self._stages
        is_stream = isinstance(task, PredictRequest) and task.stream
        if rules.ttl_s and isinstance(task, GenerateRequest | EncodeRequest | PredictRequest) and not is_stream:
            work.stages = [*self._stages, CacheStage(rules, log)]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The gateway's headers of the response."""
        if self._shown is None:
            return []
        row = self._shown.row
        found = [(b"cf-aig-step", b"%d" % row.step)]
        if self.rules.collects_log:
            found.append((b"cf-aig-log-id", row.id.encode()))
        for name, value in (
            (b"cf-aig-cache-status", row.cache_status),
            (b"cf-aig-model", row.model),
            (b"cf-aig-provider", row.provider),
        ):
            if value:
                found.append((name, value.encode("latin-1", "replace")))
        return found

    def log_failure(self, error: EmberlineError) -> None:
        """End the log row of a universal request whose last step could not even be asked."""
        if self._log is not None and self._log.is_open:
            self._log.close(error)


def open_chain(
    owner: GatewayService,
    options: GatewayOptions,
    principal: Principal,
    service: ModelService,
    log_id: str,
    gateway: str = "",
) -> StageChain:
    """Open a gateway for an HTTP request. Raises GatewayNotFound if the account has no such gateway."""
    account, name = principal.account, gateway or options.id
    settings, floor = owner.settings.find(account, name), owner.settings.floor(account, name)
    rules = GatewayRules(owner, settings, options, principal, service.models, floor)
    return StageChain(rules, service, log_id)
