"""Preparation of steps ahead of requests: compiled kernels, CUDA graphs, plans of attention."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch

from emberline.engine.core.latency_target import EAGER_TOKENS
from emberline.engine.core.limits import Limits
from emberline.engine.core.plan import DeviceLost
from emberline.engine.runners.gpu.batch import VerifyShape
from emberline.engine.runners.gpu.draft_chain import ChainShape
from emberline.engine.runners.gpu.graphs import StepKind
from emberline.engine.runners.gpu.runner import GpuRunner
from emberline.engine.runners.gpu.shapes import is_essential, timed_verify_shapes
from emberline.engine.runners.gpu.stream import fatal
from emberline.kernels.backend import LatentAttention, MoE
from emberline.kernels.gpu.compile_server import CompileServer
from emberline.kernels.gpu.launch import compiling_only, warn_of_compiling
from emberline.models.decoder import Decoder

LONG_CHUNK = (4096, 2048)  # start and tokens of one whose attention is that of long prompts
_log = logging.getLogger(__name__)


class StepPreparation:
    """Every step shape that the limits allow, so that no request ever waits for a compiler or for a capture.

    Before requests are accepted all kernels are compiled, and the essential shapes captured, to which all others can be
    padded; that needs no weights, and is done while they are read. The others are captured while the engine is idle,
    the most common first; then cuDNN plans its attention, until when Triton's kernel computes that of long chunks.
    """

    def __init__(
        self,
        model: Decoder,
        runner: GpuRunner,
        limits: Limits,
        compile_server: CompileServer | None = None,
        timed: Callable[[Mapping[tuple[int, int], float]], None] | None = None,
    ) -> None:
        """timed: learns what steps that verify drafts take, by rows and tokens, once they are captured."""
        self._compile_server = compile_server
        self._model = model
        self._models = [model, *runner.draft_models]
        self._runner = runner
        self._limits = limits
        kinds = runner.step_kinds()
        essential = [kind for kind in kinds if self._is_essential(kind)]
        self._essential = deque(essential)
        self._others = deque(kind for kind in kinds if kind not in essential)
        self._timed = timed
        self._to_time = deque(timed_verify_shapes(limits.max_running)) if timed is not None else deque()
        self._step_s: dict[tuple[int, int], float] = {}
        self._plans = self._warm_up()
        self._set_long_plans(False)

    def _warm_up(self) -> Iterator[bool]:
        first = 0
        for model in self._models:
            yield from model.kernels.warm_up(model.attentions, self._runner.pools[first:])
            first = len(self._model.kv_groups)

    def _set_long_plans(self, usable: bool) -> None:
        for model in self._models:
            model.kernels.long_plans = usable

    @contextmanager
    def _distinct_layers(self) -> Iterator[None]:
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.distinct_layers())
            yield

    def _is_essential(self, kind: StepKind | ChainShape) -> bool:
        if isinstance(kind, ChainShape):
            return False  # nothing is drafted until it is captured
        shape, most = kind.shape, self._limits.max_running
        if isinstance(shape, VerifyShape):
            return False  # drafts are left out until it is captured
        if isinstance(shape, int):
            return not kind.cascade and is_essential(shape, None, most)
        return not kind.cascade and is_essential(shape.n_decodes, shape.n_tokens, most, self._runner.graph_tokens)

    def begin(self) -> None:
        """While weights are read."""
        began_s = time.perf_counter()
        self._compile([*self._essential, *self._others], self._many_chunks + self._long_chunks + self._eager_sizes)
        self._set_long_plans(True)
        self._compile([], self._long_chunks + self._eager_sizes)
        self._set_long_plans(False)
        if self._compile_server is not None:
            self._compile_server.close()
            self._compile_server = None
        compiled_s = time.perf_counter()
        while self._essential:
            self._runner.capture(self._essential.popleft())
        times = {"compile_s": compiled_s - began_s, "capture_s": time.perf_counter() - compiled_s}
        _log.info("the essential steps are prepared", extra={name: round(s, 3) for name, s in times.items()})

    def finish(self) -> None:
        """Once weights are there, before requests are accepted: load the libraries' kernels for large products."""
        with self._distinct_layers():
            for chunks in self._many_chunks:
                self._runner.run_eager_padding(chunks)
        self._runner.wait()
        warn_of_compiling()

    def next(self) -> bool:
        """While idle: one thing more. False: everything is prepared."""
        if self._others:
            self._runner.capture(self._others.popleft())
            return True
        if self._to_time and self._timed is not None:
            self._time_next(self._timed)
            return True
        try:
            with torch.inference_mode():
                more = next(self._plans, False)
        except Exception as error:  # then Triton's kernel goes on computing what the plans are for
            if isinstance(lost := fatal(error), DeviceLost):
                raise lost from error
            _log.warning("cuDNN could not plan attention: %s", error)
            return False
        if not more:
            self._set_long_plans(True)
            _log.info("every common step is prepared", extra={"graphs": self._runner.n_graphs})
        return more

    def _time_next(self, timed: Callable[[Mapping[tuple[int, int], float]], None]) -> None:
        n_rows, n_tokens = self._to_time.popleft()
        try:
            seconds = self._runner.time_padding(
                StepKind(n_rows if n_tokens == n_rows else VerifyShape(n_rows, n_tokens))
            )
        except Exception as error:  # then what drafts cost is learned from requests alone
            if isinstance(lost := fatal(error), DeviceLost):
                raise lost from error
            _log.warning("a step could not be timed: %s", error)
            self._to_time.clear()
            return
        if seconds is not None:
            self._step_s[n_rows, n_tokens] = seconds
        if not self._to_time and self._step_s:
            timed(self._step_s)
            by_shape = {f"{rows}x{n}": round(1e3 * s, 3) for (rows, n), s in self._step_s.items()}
            _log.info("steps that verify drafts were timed", extra={"ms": by_shape})

    def _compile(self, kinds: list[StepKind | ChainShape], eager: list[list[tuple[int, int]]] | None = None) -> None:
        """Compile all kernels of these kinds of steps, and of eager steps with these chunks."""
        try:
            with self._distinct_layers(), compiling_only(self._compile_server):
                for kind in kinds:
                    self._runner.run_padding(kind)
                for chunks in eager or []:
                    self._runner.run_eager_padding(chunks)
        except Exception as error:  # it will fail again, and be reported, where the kernel is launched
            if isinstance(lost := fatal(error), DeviceLost):
                raise lost from error
            _log.warning("kernels could not be compiled ahead of requests: %s", error)

    @property
    def _many_chunks(self) -> list[list[tuple[int, int]]]:
        """A step of many short prompts that is too large for a CUDA graph, as chunks."""
        n_tokens, n_chunks = self._limits.token_budget, min(64, self._limits.max_running)
        chunk = (0, min(n_tokens // n_chunks, self._limits.context_len))
        return [[chunk] * n_chunks] if n_tokens >= EAGER_TOKENS else []

    @property
    def _eager_sizes(self) -> list[list[tuple[int, int]]]:
        """Steps beyond the CUDA graphs of a model whose kernels vary with a step's size: of latents, or of experts.

        One long chunk of each size, and many chunks too short for a library's attention.
        """
        latent = any(isinstance(attn, LatentAttention) for attn in self._model.attentions)
        if not latent and not any(isinstance(block, MoE) for block in self._model.feed_forwards):
            return []
        most = min(self._limits.token_budget, self._limits.context_len)
        sizes = [n for n in (512 << i for i in range(8)) if self._runner.graph_tokens < n <= most]
        short = [[(0, 16)] * min(64, self._limits.max_running)] if latent else []
        return [*([(0, n)] for n in sizes), *short]

    @property
    def _long_chunks(self) -> list[list[tuple[int, int]]]:
        """The second is of an odd size: libraries do not multiply every number of rows."""
        start, n = LONG_CHUNK
        fits = self._limits.token_budget >= n and self._limits.context_len >= start + n
        return [[LONG_CHUNK], [(start, n - 1)]] if fits else []
