"""Applies the guardrails of a gateway: patterns here, moderation models through the pipeline."""

from collections.abc import Sequence

import msgspec

from emberline.catalog.model_card import TEXT_CLASSIFICATION
from emberline.gateway.gateway_errors import PromptBlocked, ResponseBlocked
from emberline.gateway.guardrails import applicable, matches, prompt_text
from emberline.gateway.pipeline import Pipeline
from emberline.protocol.errors import EmberlineError, Unavailable, Unsupported
from emberline.protocol.gateway import GatewaySettings, Guardrail
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import EncodeRequest, GenerateRequest, Message, Principal, SamplingParams
from emberline.service.event_collector import collect_answer
from emberline.telemetry.request_log import AttemptContext

MAX_VERDICT_TOKENS = 16


class Moderator:
    """The guardrails of one request. `flags` names those that its prompt or reply has violated."""

    def __init__(
        self,
        settings: GatewaySettings,
        pipeline: Pipeline,
        principal: Principal,
        request_id: str,
        own_key: OwnKey | None = None,
    ) -> None:
        self.flags: list[str] = []
        self.prompt_rules = applicable(settings.guardrails, "request")
        self.reply_rules = applicable(settings.guardrails, "response")
        self._settings = settings
        self._pipeline = pipeline
        self._own_key = own_key
        # The account chose the model, whatever models this caller's key may use.
        self._principal = msgspec.structs.replace(principal, models=())
        self._request_id = request_id
        self._n_asked = 0

    async def check_prompt(self, request: GenerateRequest) -> None:
        """PromptBlocked names the guardrail."""
        if self.prompt_rules:
            is_text = request.prompt_ids is None and not any(message.images for message in request.messages or ())
            await self.check_texts((prompt_text(request),), is_text)

    async def check_texts(self, texts: Sequence[str], is_text: bool = True) -> None:
        """Check the texts that a request of any kind sends to a model. Raises Unsupported for anything but text."""
        if not self.prompt_rules:
            return
        if not is_text:
            raise Unsupported("a gateway with guardrails takes texts, not token ids or images", param="prompt")
        if (rule := await self._violated(self.prompt_rules, "\n".join(texts))) is not None:
            raise PromptBlocked(self._blocked("prompt", rule))

    async def check_reply(self, text: str) -> None:
        """ResponseBlocked names the guardrail."""
        if (rule := await self._violated(self.reply_rules, text)) is not None:
            raise ResponseBlocked(self._blocked("reply", rule))

    def _blocked(self, what: str, rule: Guardrail) -> str:
        return f"the {what} was blocked by the guardrail {rule.name!r} of gateway {self._settings.name}"

    async def _violated(self, rules: Sequence[Guardrail], text: str) -> Guardrail | None:
        """The first rule that blocks the text; those that only flag it are noted."""
        for rule in rules if text else ():
            if not await (matches(rule, text) if rule.pattern else self._is_unsafe(rule, text)):
                continue
            if rule.name not in self.flags:
                self.flags.append(rule.name)
            if rule.action == "block":
                return rule
        return None

    async def _is_unsafe(self, rule: Guardrail, text: str) -> bool:
        """Asks the moderation model. While it cannot answer, nothing passes: the request fails. The account pays for
        its tokens; a chat model counts for no limit on requests."""
        self._n_asked += 1
        request_id = f"{self._request_id}-guard-{self._n_asked}"
        try:
            card = self._pipeline.models.find(rule.model)
            if card.task == TEXT_CLASSIFICATION:
                asked = EncodeRequest(id=request_id, model=card.id, texts=(text,), truncate=True, api="run")
                context = AttemptContext(own_key=self._own_key)
                encoded = await self._pipeline.encode(asked, self._principal, attempt=context, card=card)
                scores = dict(zip(encoded.labels, next(iter(encoded.rows())), strict=False))
                return any(scores.get(label, 0.0) >= rule.threshold for label in rule.labels)
            sampling = SamplingParams(temperature=0, max_tokens=MAX_VERDICT_TOKENS)
            messages = (Message("user", text),)
            request = GenerateRequest(id=request_id, model=card.id, messages=messages, sampling=sampling, api="chat")
            context = AttemptContext(is_retry=True, own_key=self._own_key)
            events = self._pipeline.generate(request, self._principal, attempt=context, card=card)
            answer = await collect_answer(events)
            return answer.choices[0].text.strip().lower().startswith("unsafe")
        except EmberlineError as error:
            raise Unavailable(
                f"the guardrail {rule.name!r} cannot be applied: its model {rule.model} fails ({error.message})",
                retry_after_s=error.retry_after_s or 1,
            ) from error
