"""Preparation of steps ahead of requests: compiled kernels, CUDA graphs, plans of attention."""

import logging
import time
from collections import deque
from collections.abc import Iterator

import torch

from emberline.engine.gpu.runner import GpuRunner, StepKind, fatal
from emberline.engine.gpu.shapes import is_essential
from emberline.engine.scheduler.latency_target import EAGER_TOKENS
from emberline.engine.scheduler.limits import Limits
from emberline.engine.scheduler.plan import DeviceLost
from emberline.kernels.backend import LatentAttention, MoE
from emberline.kernels.gpu.compile_server import CompileServer
from emberline.kernels.gpu.launch import compiling_only
from emberline.models.decoder import Decoder

LONG_CHUNK = (4096, 2048)  # start and tokens of one whose attention is that of long prompts
_log = logging.getLogger(__name__)


class StepPreparation:
    """Every step shape that the limits allow, so that no request ever waits for a compiler or for a capture.

    Before requests are accepted all kernels are compiled, and the essential shapes captured, to which all others can be
    padded. The others are captured while the engine is idle, the most common first; then cuDNN plans its attention,
    until when Triton's kernel computes that of long chunks.
    """

    def __init__(
        self, model: Decoder, runner: GpuRunner, limits: Limits, compile_server: CompileServer | None = None
    ) -> None:
        self._compile_server = compile_server
        self._model = model
        self._runner = runner
        self._limits = limits
        kinds = runner.step_kinds()
        essential = [kind for kind in kinds if self._is_essential(kind)]
        self._essential = deque(essential)
        self._others = deque(kind for kind in kinds if kind not in essential)
        self._plans: Iterator[bool] = model.kernels.warm_up(model.attentions, runner.pools)
        model.kernels.long_plans = False

    def _is_essential(self, kind: StepKind) -> bool:
        shape, most = kind.shape, self._limits.max_running
        if isinstance(shape, int):
            return not kind.cascade and is_essential(shape, None, most)
        return not kind.cascade and is_essential(shape.n_decodes, shape.n_tokens, most, self._runner.graph_tokens)

    def first(self) -> None:
        """While weights are read: the step of a first prompt. More would slow that down."""
        began_s = time.perf_counter()
        self._compile([self._essential[0]])
        self._runner.capture(self._essential.popleft())
        _log.info("the first step is prepared", extra={"seconds": round(time.perf_counter() - began_s, 3)})

    def finish_essential(self) -> None:
        """Once weights are there, before requests are accepted."""
        began_s = time.perf_counter()
        self._compile([*self._essential, *self._others], self._many_chunks + self._long_chunks + self._eager_sizes)
        self._model.kernels.long_plans = True
        self._compile([], self._long_chunks + self._eager_sizes)
        self._model.kernels.long_plans = False
        compiled_s = time.perf_counter()
        if self._compile_server is not None:
            self._compile_server.close()
            self._compile_server = None
        with self._model.distinct_layers():
            for chunks in self._many_chunks:
                self._runner.run_eager_padding(chunks)  # loads the libraries' kernels for large products
        while self._essential:
            self._runner.capture(self._essential.popleft())
        times = {"compile_s": compiled_s - began_s, "capture_s": time.perf_counter() - compiled_s}
        _log.info("the essential steps are prepared", extra={name: round(s, 3) for name, s in times.items()})

    def next(self) -> bool:
        """While idle: one thing more. False: everything is prepared."""
        if self._others:
            self._runner.capture(self._others.popleft())
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
            self._model.kernels.long_plans = True
            _log.info("every common step is prepared", extra={"graphs": self._runner.n_graphs})
        return more

    def _compile(self, kinds: list[StepKind], eager: list[list[tuple[int, int]]] | None = None) -> None:
        """Compile all kernels of these kinds of steps, and of eager steps with these chunks."""
        try:
            with self._model.distinct_layers(), compiling_only(self._compile_server):
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
