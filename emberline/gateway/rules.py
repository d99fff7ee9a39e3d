"""The rules of a gateway, as one HTTP request is held to them: its settings, and the options of the request."""

from emberline.catalog.model_card import ModelCard
from emberline.gateway.attempts import LOCAL, PlanStep
from emberline.gateway.gateways import GatewayService
from emberline.gateway.guardrails import applicable
from emberline.gateway.options import cache_ttl_s, is_operators_timeout, retry_policy
from emberline.gateway.routing import OURS, Counter, Plan, plan
from emberline.protocol.errors import EmberlineError, ModelNotFound
from emberline.protocol.gateway import DYNAMIC, GatewayOptions, GatewaySettings, StepConfig
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import Principal, alias_caller
from emberline.service.models import ModelLookup


class GatewayRules:
    """Settings and options together, and the models that they lead to."""

    def __init__(
        self,
        owner: GatewayService,
        settings: GatewaySettings,
        options: GatewayOptions,
        principal: Principal,
        models: ModelLookup,
        floor: GatewaySettings | None = None,
    ) -> None:
        """`floor`: the operator's gateway, whose rules no option of a request loosens."""
        self.settings = settings
        self.options = options
        self.owner = owner
        self.principal = principal
        self.models = models
        self._floor = floor
        asked = options.collect_log_payload
        self.logs_content = settings.log_content if asked is None else asked
        self.collects_log = settings.collect_logs if options.collect_log is None else options.collect_log
        if floor is not None:
            self.logs_content |= floor.log_content
            self.collects_log |= floor.collect_logs
        self.begin_step()
        self._cards: dict[tuple[str, str], ModelCard] = {}  # by name and caller
        self._plan: tuple[str, Plan] | None = None  # of the next request, and the name of its model

    def begin_step(self, number: int = 0, step: StepConfig | None = None, has_next: bool = False) -> None:
        """Begin a step of a universal request; any other request is one step. `has_next`: a failure is not the end."""
        self.first_step, self.has_next_step = number, has_next
        self.own_key: OwnKey | None = None  # a provider's, which the client sends along
        self.ttl_s = cache_ttl_s(self.settings, self.options, step)
        policy = retry_policy(self.settings, self.options, step, self._floor)
        self.retry_policy = policy._replace(is_timeout_free=is_operators_timeout(policy, self._floor))
        # True if replies, or prompts, must be read, and cannot be passed on as they come.
        guards = self.settings.guardrails
        self.reads_replies = bool(self.ttl_s or self.logs_content or (guards and applicable(guards, "response")))
        self.reads_prompts = self.reads_replies or bool(guards)

    def plan(self, model: str, session: str | None, request_id: str) -> Plan:
        """Plan the models that the next request tries, once. Planning does not count for the limits of routes.

        A model without fallbacks that is no route is tried alone."""
        caller = alias_caller(self.principal.account, session, request_id)
        if self._plan is None or (self._plan[0], self._plan[1].caller) != (model, caller):
            if self.settings.fallbacks or model.startswith(DYNAMIC):
                found = plan(self.settings, model, self.options.metadata or {}, caller, self)
            else:
                found = Plan((model.removeprefix(OURS),), caller)
            self._plan = model, found
        return self._plan[1]

    def take_plan(self, model: str, session: str | None, request_id: str) -> Plan:
        """Return the plan of a request that begins now. Another request of the same call is planned anew."""
        found, self._plan = self.plan(model, session, request_id), None
        return found

    def card(self, model: str, caller: str) -> ModelCard:
        """Find the model with this name, once for the HTTP request. Raises ModelNotFound if there is none."""
        key = model, caller
        if (found := self._cards.get(key)) is None:
            found = self._cards[key] = self.models.find(model, self.principal.account, caller)
        return found

    def use_model(self, model: str, session: str | None, request_id: str) -> ModelCard:
        """Find the model that is tried first. Raises ModelNotFound if there is none that could be tried."""
        models, caller, *_ = self.plan(model, session, request_id)
        for number, name in enumerate(models):
            try:
                return self.card(name, caller)
            except ModelNotFound:
                if number == len(models) - 1:
                    raise
        raise AssertionError("a plan has a model")

    def step(self, model: str, caller: str, number: int) -> PlanStep:
        """Find a model of a plan, and its provider. Raises ModelNotFound if there is no such model.

        Our own fleets move a request between their workers; a provider has one, which is asked again by us."""
        card = self.card(model, caller)
        if not self.models.is_upstream(card):
            return PlanStep(card, LOCAL, number)
        upstream = self.models.upstream
        return PlanStep(card, upstream.provider_of(card), number, upstream.n_servers(card) - 1)

    def relays(self, models: Plan) -> bool:
        """True if upstream servers compute all models of the plan."""
        try:
            return all(self.models.is_upstream(self.card(name, models.caller)) for name in models.models)
        except EmberlineError:  # there is no such model: whether another one is tried is decided where it is asked
            return False

    def has_room(self, counter: Counter) -> bool:
        return self.owner.counters.has_room(self.principal.account, self.settings.name, counter)

    def count(self, counter: Counter, amount: int) -> None:
        """Count a request, or its cost, for a limit of a route."""
        self.owner.counters.add(self.principal.account, self.settings.name, counter, amount)
