"""The stage of a gateway's response cache: it answers a request from the cache, or keeps the computed answer."""

import time

import msgspec

from emberline.gateway.log_stage import LogStage
from emberline.gateway.response_cache import CachedReply, request_digest
from emberline.gateway.rules import GatewayRules
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import Completed, Started, TextEvent, Usage
from emberline.protocol.prediction import Prediction
from emberline.protocol.request import EncodeRequest, GenerateRequest, PredictRequest
from emberline.service.event_collector import events_of
from emberline.service.work import Work

_to_json = msgspec.json.Encoder().encode
_to_prediction = msgspec.json.Decoder(Prediction).decode


class CacheStage:
    """Looks one request up in the cache. It begins after the log stage, whose row says what it found."""

    def __init__(self, rules: GatewayRules, log: LogStage) -> None:
        self._rules = rules
        self._log = log
        self._digest = ""

    async def begin(self, work: Work) -> None:
        """Answer the request from the cache, if the caller may use the model of the reply."""
        task, rules, log = work.task, self._rules, self._log
        assert isinstance(task, GenerateRequest | EncodeRequest | PredictRequest)
        self._digest = self._key(task)
        found = await rules.owner.cache.get(rules.principal.account, self._digest)
        if found is not None and not self._may_use(found.model):
            found = None
        log.row.cache_status = "MISS" if found is None else "HIT"
        if found is None:
            return
        log.replayed(found)
        work.replay = replay(found)

    def end(self, work: Work, error: BaseException | None) -> BaseException | None:
        """Keep the reply if it is complete, whether or not the client reads its last byte."""
        rules, row, completed = self._rules, self._log.row, work.completed
        if work.is_done and work.replay is None and completed is not None:
            reply = CachedReply(
                answer=None if self._log.reply is None else self._log.reply.answer(completed.usage),
                encoded=completed.result if isinstance(completed.result, Encoded) else None,
                prediction=_to_json(completed.result) if isinstance(completed.result, Prediction) else b"",
                model=row.model,
                provider=row.provider,
                expires_us=time.time_ns() // 1000 + rules.ttl_s * 1_000_000,
            )
            rules.owner.cache.put(row.account, self._digest, reply)
        return error

    def _key(self, request: GenerateRequest | EncodeRequest | PredictRequest) -> str:
        """Make the key of the request's reply in the cache.

        The guardrails, routes and fallbacks of the gateway are part of the key, and the models that aliases stand for:
        a reply that other rules let through is not served."""
        rules, settings = self._rules, self._rules.settings
        models = [self._model_id(model) for model in self._log.plan.models]
        judges = [self._model_id(rule.model) for rule in settings.guardrails if rule.model]
        judged = msgspec.json.encode(
            [settings.guardrails, judges, settings.routes, settings.fallbacks], order="deterministic"
        )
        if isinstance(request, PredictRequest):  # another version of a predictor has the same id
            models = [self._version(model) for model in self._log.plan.models]
        account, custom_key = rules.principal.account, rules.options.cache_key
        return request_digest(account, settings.name, models, request, custom_key, judged)

    def _model_id(self, model: str) -> str:
        """The id of the model that a name stands for; the name itself if there is none, as a fallback may answer."""
        try:
            return self._rules.card(model, self._log.plan.caller).id
        except EmberlineError:
            return model

    def _version(self, model: str) -> str:
        try:
            card = self._rules.card(model, self._log.plan.caller)
        except EmberlineError:
            return model
        return f"{card.id} {card.fingerprint}"

    def _may_use(self, model: str) -> bool:
        models, principal = self._rules.models, self._rules.principal
        try:
            models.check_scope(models.find(model, principal.account), principal)
        except EmberlineError:  # also if the model is gone
            return False
        return True


def replay(reply: CachedReply) -> list[TextEvent]:
    """The events of a cached reply, which costs nothing."""
    if reply.prediction:
        return [Completed(Usage(), None, 0, _to_prediction(reply.prediction))]
    if reply.answer is None:
        assert reply.encoded is not None
        return [Completed(reply.encoded.usage, None, 0, reply.encoded)]
    usage = reply.answer.usage
    completed = Completed(msgspec.structs.replace(usage, cost=None), None, 0)
    return [Started(usage), *events_of(reply.answer), completed]
