"""The endpoints of one model: which are there, and which pair takes a request."""

from collections.abc import Sequence
from statistics import median_low

from emberline.balancer.cost_model import Settings
from emberline.balancer.routing_policy import Need, here_s, make_decode_policy, make_policy, moved_s
from emberline.balancer.worker import Worker

OUTPUT_TOKENS = 200.0  # expected of a reply before any has ended
_SMOOTHING = 0.05


class WorkerPair:
    """Who draws the tokens, who computes the prompt, and who of them has no room yet."""

    __slots__ = ("blocker", "decode", "prefill")

    def __init__(self, decode: Worker, prefill: Worker, blocker: Worker | None) -> None:
        self.decode = decode
        self.prefill = prefill
        self.blocker = blocker


class Pool:
    def __init__(self, model: str, settings: Settings) -> None:
        self.model = model
        self.workers: list[Worker] = []
        self.output_tokens = OUTPUT_TOKENS  # smoothed
        self._settings = settings
        self._alone = make_policy(settings)  # where whoever draws the tokens computes the prompt too
        self._prefill = make_policy(settings)
        self._decode = make_decode_policy(settings)
        self._able: list[Worker] = []
        self._ready: tuple[list[Worker], list[Worker]] = ([], [])

    def refresh(self) -> None:
        """Something about an endpoint's health has changed."""
        self._able = [worker for worker in self.workers if worker.ready]
        self._ready = self._apart(self._able)

    def candidates(self, avoid: Sequence[str]) -> tuple[list[Worker], list[Worker]]:
        """For drawing tokens, and for prompts alone. Whoever is to be avoided, is stuck or fails comes in only when
        nobody else is there."""
        decoders, prefillers = self._ready
        if avoid:
            decoders, prefillers = self._apart([worker for worker in self._able if worker.name not in avoid])
        if decoders:
            return decoders, prefillers
        connected = [worker for worker in self.workers if worker.connected and not worker.draining]
        wanted, others = self._apart([worker for worker in connected if worker.name not in avoid])
        return (wanted, others) if wanted else self._apart(connected)

    def decide(self, decoders: list[Worker], prefillers: list[Worker], need: Need, now_s: float) -> WorkerPair:
        if not prefillers:
            decode = self._alone.choose(decoders, need, now_s)
            return WorkerPair(decode, decode, None if self._room(decode, need, now_s, prompt=True) else decode)
        prefill = self._prefill.choose(prefillers, need, now_s)
        need.there_s = prefill.wait_s(now_s) + need.prefill_s(prefill)
        need.there_scale = prefill.prefill_pace.scale
        decode = self._decode.choose(decoders, need, now_s)
        if self._local(decode, need, now_s):
            prefill = decode
        if not self._room(decode, need, now_s, prompt=prefill is decode):
            return WorkerPair(decode, prefill, decode)
        if prefill is not decode and self._backed_up(prefill, now_s):
            return WorkerPair(decode, prefill, prefill)
        return WorkerPair(decode, prefill, None)

    def paired(self, decode: Worker, need: Need, now_s: float) -> WorkerPair | None:
        """The pair of a given decode endpoint. None: it needs another for the prompt, and none is there."""
        if decode.endpoint.alone:
            return WorkerPair(decode, decode, None)
        prefillers = self.candidates(())[1]
        return WorkerPair(decode, self._prefill.choose(prefillers, need, now_s), None) if prefillers else None

    def ended(self, output_tokens: int) -> None:
        self.output_tokens += _SMOOTHING * (output_tokens - self.output_tokens)

    def relax(self, now_s: float) -> None:
        prefill = [worker.prefill_pace.scale for worker in self.workers if worker.prefill_pace.n]
        decode = [worker.decode_pace.scale for worker in self.workers if worker.decode_pace.n]
        for worker in self.workers if prefill else ():
            worker.relax(median_low(prefill), median_low(decode) if decode else 1.0, now_s)

    def _local(self, decode: Worker, need: Need, now_s: float) -> bool:
        """Whether the decode endpoint computes the prompt itself: when that is little, or when it is done with it, and
        every stream that it holds up meanwhile made good for, before the prefill endpoint would be: a conversation's
        cache lives where it is decoded, and prefill endpoints may have lost it."""
        if not decode.endpoint.alone:
            return False
        if need.tokens - need.cached(decode) <= self._settings.local_tokens:
            return True
        return here_s(decode, need, now_s) < need.there_s + moved_s(decode, need)

    def _room(self, worker: Worker, need: Need, now_s: float, prompt: bool) -> bool:
        if not self._alone.holds:
            return worker.fits(need.n, need.tokens, now_s, need.passes_flex, spare=self._settings.max_waiting)
        return worker.fits(need.n, need.tokens, now_s, need.passes_flex) and not (
            prompt and self._backed_up(worker, now_s)
        )

    def _backed_up(self, worker: Worker, now_s: float) -> bool:
        return self._prefill.holds and worker.wait_s(now_s) > self._settings.ahead_s

    def _apart(self, workers: list[Worker]) -> tuple[list[Worker], list[Worker]]:
        prefillers = [worker for worker in workers if worker.endpoint.role == "prefill"]
        decoders = [worker for worker in workers if worker.endpoint.role != "prefill"]
        return decoders if prefillers else [worker for worker in decoders if worker.endpoint.alone], prefillers
