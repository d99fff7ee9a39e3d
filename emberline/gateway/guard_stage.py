"""The stage of a gateway's guardrails: patterns are matched here, moderation models are asked through the pipeline."""

from collections.abc import Sequence
from functools import partial

import msgspec

from emberline.catalog.model_card import TEXT_CLASSIFICATION
from emberline.gateway.gateway_errors import PromptBlocked, ResponseBlocked
from emberline.gateway.guardrails import HeldReply, applicable, matches, prompt_text, strings
from emberline.protocol.complete_response import Encoded
from emberline.protocol.errors import EmberlineError, Unavailable, Unsupported
from emberline.protocol.events import Completed, TextDelta, TextEvent
from emberline.protocol.gateway import GatewaySettings, Guardrail
from emberline.protocol.media import MediaRequest
from emberline.protocol.prediction import Prediction, has_files, holds_file
from emberline.protocol.provider import OwnKey
from emberline.protocol.request import (
    EncodeRequest,
    GenerateRequest,
    Message,
    PredictRequest,
    Principal,
    SamplingParams,
    SpeechRequest,
)
from emberline.service.event_collector import collect_answer, result_of
from emberline.service.models import ModelLookup
from emberline.service.work import TaskRunner, Work
from emberline.telemetry.request_log import AttemptContext

MAX_VERDICT_TOKENS = 16
_NO_FILES = "a gateway with guardrails on replies takes models that return text, not files"


class GuardStage:
    """The guardrails of one request. `flags` gets the names of those that its prompt or reply has violated."""

    def __init__(
        self,
        settings: GatewaySettings,
        models: ModelLookup,
        runner: TaskRunner,
        principal: Principal,
        request_id: str,
        flags: list[str] | None = None,
    ) -> None:
        self.flags = [] if flags is None else flags
        self._prompt_rules = applicable(settings.guardrails, "request")
        self._reply_rules = applicable(settings.guardrails, "response")
        self._settings = settings
        self._models = models
        self._runner = runner
        self._own_key: OwnKey | None = None
        # The account chose the model, whatever models this caller's key may use.
        self._principal = msgspec.structs.replace(principal, models=())
        self._request_id = request_id
        self._n_asked = 0

    async def begin(self, work: Work) -> None:
        """Check the prompt, and hold the reply back until it is checked. Raises PromptBlocked."""
        task, self._own_key = work.task, work.own_key
        if isinstance(task, GenerateRequest):
            await self.check_prompt(task)
            if self._reply_rules:
                held = HeldReply(any(rule.hold == "whole" for rule in self._reply_rules))
                work.taps.append(partial(self._checked, held))
        elif isinstance(task, EncodeRequest):
            await self.check_texts((*task.texts, task.query or ""), is_text=not task.token_ids)
        elif isinstance(task, SpeechRequest):
            await self.check_texts((task.prompt,))
        elif isinstance(task, PredictRequest):
            await self._begin_prediction(work, task)
        else:
            assert isinstance(task, MediaRequest), "guardrails read what is sent, so nothing is relayed"
            await self.check_texts([value for value in task.fields.values() if isinstance(value, str)])

    def end(self, work: Work, error: BaseException | None) -> BaseException | None:
        """Return the error as it is."""
        return error

    async def _begin_prediction(self, work: Work, task: PredictRequest) -> None:
        """Check all texts of a prediction's input, and its whole output. Raises Unsupported for files in either."""
        source = self._models.find(task.model, self._principal.account).predictor
        fields = {} if source is None else source.input.get("properties", {})
        texts = [*strings(task.input, numbers=True), *strings(task.context)]
        given = [name for name in task.input if has_files(fields.get(name, {})) and task.input[name] is not None]
        await self.check_texts(texts, is_text=not given and not any(map(holds_file, texts)))
        if not self._reply_rules:
            return
        if source is not None and has_files(source.output):
            raise Unsupported(_NO_FILES)
        work.taps.append(partial(self._checked_prediction, HeldReply(whole=True)))

    async def _checked_prediction(self, held: HeldReply, event: TextEvent) -> list[TextEvent]:
        """Check an event of a prediction. Raises Unsupported for a file in its output, wherever it is."""
        texts, joined = list[str](), ""
        if isinstance(event, TextDelta):
            texts = [event.text]
        elif isinstance(event, Completed) and isinstance(event.result, Prediction):
            output = msgspec.json.decode(event.result.whole)
            texts = strings(output, numbers=True)
            if isinstance(output, list) and all(isinstance(each, str) for each in output):
                joined = "".join(output)  # as clients show it
            await self.check_reply("\n".join([*texts, joined, event.result.logs]))
        if any(map(holds_file, texts)):
            raise Unsupported(_NO_FILES)
        return await self._checked(held, event)

    async def _checked(self, held: HeldReply, event: TextEvent) -> list[TextEvent]:
        """Hold an event of the reply back, or let through what was held and is checked now. Raises ResponseBlocked."""
        is_last = isinstance(event, Completed)
        if not is_last and held.add(event) is None:
            return []
        await self.check_reply(held.text())
        return [*held.take(), event] if is_last else held.take()

    async def check_prompt(self, request: GenerateRequest) -> None:
        """Check all that a request sends to a model. Raises PromptBlocked, which names the guardrail."""
        if self._prompt_rules:
            is_text = request.prompt_ids is None and not any(message.n_media for message in request.messages or ())
            await self.check_texts((prompt_text(request),), is_text)

    async def check_texts(self, texts: Sequence[str], is_text: bool = True) -> None:
        """Check the texts that a request of any kind sends to a model. Raises Unsupported for anything but text."""
        if not self._prompt_rules:
            return
        if not is_text:
            raise Unsupported("a gateway with guardrails takes texts, not token ids or images", param="prompt")
        if (rule := await self._violated(self._prompt_rules, "\n".join(texts))) is not None:
            raise PromptBlocked(self._blocked("prompt", rule))

    async def check_reply(self, text: str) -> None:
        """Check a part of the reply. Raises ResponseBlocked, which names the guardrail."""
        if (rule := await self._violated(self._reply_rules, text)) is not None:
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
        """Ask the moderation model. While it cannot answer, nothing passes: the request fails. The account pays for
        its tokens; a chat model counts for no limit on requests."""
        self._n_asked += 1
        request_id = f"{self._request_id}-guard-{self._n_asked}"
        try:
            card = self._models.find(rule.model, self._principal.account)
            if card.task == TEXT_CLASSIFICATION:
                task = EncodeRequest(id=request_id, model=card.id, texts=(text,), truncate=True, api="run")
                work = Work(task, self._principal, card=card, own_key=self._own_key)
                encoded: Encoded = await result_of(self._runner.run(work))
                scores = dict(zip(encoded.labels, next(iter(encoded.rows())), strict=False))
                return any(scores.get(label, 0.0) >= rule.threshold for label in rule.labels)
            sampling = SamplingParams(temperature=0, max_tokens=MAX_VERDICT_TOKENS)
            messages = (Message("user", text),)
            chat = GenerateRequest(id=request_id, model=card.id, messages=messages, sampling=sampling, api="chat")
            uncounted = AttemptContext(is_retry=True)
            work = Work(chat, self._principal, card=card, own_key=self._own_key, attempt=uncounted)
            answer = await collect_answer(self._runner.run(work))
            return answer.choices[0].text.strip().lower().startswith("unsafe")
        except EmberlineError as error:
            raise Unavailable(
                f"the guardrail {rule.name!r} cannot be applied: its model {rule.model} fails ({error.message})",
                retry_after_s=error.retry_after_s or 1,
            ) from error
