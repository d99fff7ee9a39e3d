"""The outermost stage of a gateway: it plans a request, has its models tried, and writes the one log row about it."""

import time
from functools import partial

import msgspec

from emberline.accounts.usage_row import UsageRow
from emberline.gateway.attempts import Attempts, final_error, tries_next
from emberline.gateway.log import MAX_CONTENT_CHARS, LogRow, shortened
from emberline.gateway.response_cache import CachedReply
from emberline.gateway.routing import Plan
from emberline.gateway.rules import GatewayRules
from emberline.protocol.complete_response import Answer
from emberline.protocol.errors import EmberlineError
from emberline.protocol.events import Usage
from emberline.protocol.prediction import Prediction, loggable
from emberline.protocol.request import GenerateRequest, PredictRequest
from emberline.service.event_collector import AnswerCollector
from emberline.service.work import Begun, RelayRequest, Start, Task, Work
from emberline.telemetry.request_log import AttemptContext


class LogStage:
    """One request and its log row. The steps of a universal request share them."""

    def __init__(self, rules: GatewayRules, log_id: str, task: Task) -> None:
        self.plan = Plan(())
        self.is_open = False  # a step of a universal request has failed, and another one follows
        self.flags: list[str] = []  # names of the guardrails that the prompt or the reply has violated
        self.reply: AnswerCollector | None = None  # the answer so far, if it is logged or cached
        self._rules = rules
        self._began_s = time.monotonic()
        self._attempts = Attempts(task.id, rules.principal.account, rules.owner.breakers)
        self.row = LogRow(
            id=log_id,
            account=rules.principal.account,
            gateway=rules.settings.name,
            created_us=time.time_ns() // 1000,
            key_id=rules.principal.key_id,
            api=task.api,
            requested=task.model,
            event_id=rules.options.event_id or "",
        )

    async def begin(self, work: Work) -> None:
        """Plan the request. Raises BadInput if there is no such route."""
        task, rules = work.task, self._rules
        self.is_open, self.reply = False, None
        self.plan = rules.take_plan(task.model, task.session, task.id)
        for counter in self.plan.rates:
            rules.count(counter, 1)
        if isinstance(task, GenerateRequest) and (rules.logs_content or rules.ttl_s):
            if rules.logs_content:
                self.row.request = shortened(msgspec.json.encode(task.messages or task.prompt).decode())
            self.reply = AnswerCollector(task.n)
            work.taps.append(self.reply.tap)
        elif isinstance(task, PredictRequest) and rules.logs_content:
            self.row.request = self._shown_input(task)
            if task.stream:
                self.reply = AnswerCollector(1)
                work.taps.append(self.reply.tap)
        work.attempts = partial(self._attempt, work)

    def _shown_input(self, task: PredictRequest) -> str:
        """A predictor's input as the log has it."""
        try:
            source = self._rules.card(task.model, self.plan.caller).predictor
        except EmberlineError:  # the request fails, too
            return ""
        return shortened(msgspec.json.encode(loggable(task.input, {} if source is None else source.input)).decode())

    async def _attempt(self, work: Work, start: Start) -> Begun:
        """Try the models of the plan until one begins to answer."""
        rules, row, last = self._rules, self.row, len(self.plan.models) - 1
        # Nobody has seen anything of a relayed reply that comes whole: its failure counts no tokens.
        bills_failure = not isinstance(work.task, RelayRequest) or work.task.stream
        context = AttemptContext(bills_failure=bills_failure, on_end=self._count)
        for number, model in enumerate(self.plan.models):
            row.model, row.provider, row.step = model, "", rules.first_step + number
            try:
                step = rules.step(model, self.plan.caller, row.step)
                row.model, row.provider = step.model, step.provider
                begun = await self._attempts.begin(work, step, rules.retry_policy, start, context)
                row.ttft_us = self._elapsed_us()
                return begun
            except EmberlineError as error:
                if number == last or not tries_next(error):
                    raise
        raise AssertionError("a plan has a model")

    def _count(self, row: UsageRow) -> None:
        """Count what an attempt cost, finished or not, for the budgets of the route that chose its model."""
        rules, cost_pico = self._rules, row.cost_pico
        if rules.settings.custom_cost_counts and (custom := rules.options.custom_cost) is not None:
            cost_pico = custom.cost_pico(row.input_tokens, row.output_tokens)
        for counter in self.plan.budgets:
            rules.count(counter, cost_pico or 0)

    def replayed(self, reply: CachedReply) -> None:
        """Note that the cache has answered the request."""
        row, answer = self.row, reply.answer
        self._take(Usage() if answer is None else answer.usage, 0)
        row.model, row.provider, row.ttft_us = reply.model, reply.provider, self._elapsed_us()
        if answer is not None and self._rules.logs_content:
            row.response = _text(answer)

    def _take(self, usage: Usage, cost_pico: int | None) -> None:
        """Log what an answer used. The client's own cost replaces the price in the log, and nowhere else."""
        row = self.row
        row.input_tokens, row.output_tokens = usage.prompt_tokens, usage.completion_tokens
        row.cached_tokens, row.cost_pico = usage.cached_tokens, cost_pico
        if (custom := self._rules.options.custom_cost) is not None and row.cache_status != "HIT":
            row.cost_pico = custom.cost_pico(usage.prompt_tokens, usage.completion_tokens)

    def end(self, work: Work, error: BaseException | None) -> BaseException | None:
        """Write the log row, unless another step of a universal request follows. Returns the gateway's error."""
        row, rules, completed = self.row, self._rules, work.completed
        if completed is not None and work.replay is None:
            self._take(completed.usage, completed.cost_pico)
            if work.is_done and self.reply is not None and rules.logs_content:
                row.response = _text(self.reply.answer(completed.usage))
            elif work.is_done and isinstance(completed.result, Prediction) and rules.logs_content:
                found = completed.result
                start = memoryview(found.pieces[0] if found.pieces else found.output)[: 4 * MAX_CONTENT_CHARS]
                row.response = shortened(bytes(start).decode("utf-8", "replace"))
        self._attempts.ended(work, error)
        if isinstance(error, EmberlineError):
            if rules.has_next_step and tries_next(error) and row.ttft_us is None:
                self.is_open = True
                return error
            error = self._failed(error)
        elif error is not None:
            row.status = "error" if isinstance(error, Exception) else "cancelled"
            row.error = "internal" if isinstance(error, Exception) else ""
        self._log()
        return error

    def close(self, error: EmberlineError) -> None:
        """Write the log row of a universal request whose last step could not even be asked."""
        self.is_open = False
        self._failed(error)
        self._log()

    def _failed(self, error: EmberlineError) -> EmberlineError:
        """Note the failure in the log row. Returns the error for the client."""
        told = final_error(error, len(self._attempts.made))
        self.row.status, self.row.error, self.row.message = "error", told.kind, told.message
        return told

    def _log(self) -> None:
        row, rules = self.row, self._rules
        if not rules.collects_log:
            return
        row.duration_us = self._elapsed_us()
        if rules.options.metadata:
            row.metadata = msgspec.json.encode(rules.options.metadata).decode()
        if self._attempts.made:
            row.attempts = msgspec.json.encode(self._attempts.made).decode()
        if self.flags:
            row.flags = msgspec.json.encode(self.flags).decode()
        rules.owner.logs.add(row)

    def _elapsed_us(self) -> int:
        return int((time.monotonic() - self._began_s) * 1e6)


def _text(answer: Answer) -> str:
    return shortened(msgspec.json.encode(answer.choices).decode())
