"""Compiles grammars to matchers in a thread, so that no step waits for one, and caches them (LRU)."""

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from emberline.engine.grammar import validation
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.guide import GrammarGuide
from emberline.engine.grammar.matcher import LIMITS, MatcherTemplate
from emberline.engine.grammar.translator_process import TranslatorProcess
from emberline.engine.grammar.vocabulary import Vocabulary, digest
from emberline.protocol.errors import BadInput, EmberlineError, Internal, Overloaded
from emberline.protocol.frames import Vocabulary as Frame
from emberline.protocol.grammar import decode

MAX_CACHED = 64
MAX_CACHED_BYTES = 32 << 20
MAX_WAITING = 256
CLOSE_S = 10.0  # for the thread to end; a grammar that is being compiled takes no longer
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Compiled:
    prototype: MatcherTemplate
    automaton: Automaton
    vocabulary: Vocabulary
    lock: threading.RLock = field(default_factory=threading.RLock)  # of what its sequences share


class PendingGrammar:
    """A grammar being compiled; `ready` once it has succeeded or failed."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        self.compiled: _Compiled | None = None
        self.error: EmberlineError | None = None
        self.ready = False

    def guide(self) -> GrammarGuide:
        """Return a guide for one more sequence. Raises the error of the compilation if it has failed."""
        if self.error is not None:
            raise self.error
        assert self.compiled is not None, "called once it is ready"
        found = self.compiled
        with found.lock:
            return GrammarGuide(found.prototype, found.automaton, found.vocabulary, self.digest, found.lock)


class MatcherCompiler:
    """One per engine. The step loop calls `request` and `learn`; a thread and a process start with the vocabulary, and
    `close` ends them."""

    def __init__(
        self,
        vocab_size: int,
        max_cached: int = MAX_CACHED,
        max_cached_bytes: int = MAX_CACHED_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Bounds: grammars in the cache, their encoded bytes, and grammars that wait to be compiled."""
        self._vocab_size = vocab_size
        self._max_cached, self._max_cached_bytes, self._max_waiting = max_cached, max_cached_bytes, max_waiting
        self._frame: Frame | None = None
        self._digest = b""
        self._cache: OrderedDict[bytes, PendingGrammar] = OrderedDict()
        self._cache_bytes = 0
        self._vocabulary: Vocabulary | None = None  # from here on owned by the thread
        self._tokenizer: Any = None
        self._translator = TranslatorProcess()
        self._queue: queue.SimpleQueue[PendingGrammar | None] = queue.SimpleQueue()  # None: the thread ends
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)

    def learn(self, frame: Frame) -> None:
        """Set the vocabulary. Raises BadInput if it is too large, or differs from an earlier one."""
        if len(frame.tokens) > self._vocab_size:
            n = len(frame.tokens)
            raise BadInput(f"the vocabulary has {n} tokens, the model {self._vocab_size}", param="vocabulary")
        if self._frame is None:
            self._frame, self._digest = frame, digest(frame)
            self._thread.start()
        elif self._digest != digest(frame):
            raise BadInput("this vocabulary differs from the one that the engine has", param="vocabulary")

    def request(self, encoded: bytes) -> PendingGrammar:
        """Return a grammar from the cache, or one that is being compiled."""
        if self._frame is None:
            raise BadInput("a grammar needs the model's vocabulary, which was not sent", param="grammar")
        if len(encoded) > validation.MAX_BYTES:
            raise BadInput(
                f"the grammar has {len(encoded)} bytes, at most {validation.MAX_BYTES} may be", param="grammar"
            )
        found = self._cache.get(encoded)
        if found is not None and not isinstance(found.error, Internal):  # our failure may be over
            self._cache.move_to_end(encoded)
            return found
        if self._queue.qsize() >= self._max_waiting:
            raise Overloaded("too many grammars are waiting to be compiled; try again", retry_after_s=1)
        found = PendingGrammar(encoded)
        self._add_to_cache(found)
        self._queue.put(found)
        return found

    def close(self) -> None:
        """End the thread and the process of the translator. Grammars that are not compiled yet fail."""
        if self._thread.is_alive():
            self._translator.close()
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    def _add_to_cache(self, pending: PendingGrammar) -> None:
        if self._cache.pop(pending.encoded, None) is None:
            self._cache_bytes += len(pending.encoded)
        self._cache[pending.encoded] = pending
        while len(self._cache) > self._max_cached or (
            self._cache_bytes > self._max_cached_bytes and len(self._cache) > 1
        ):
            old, _ = self._cache.popitem(last=False)
            self._cache_bytes -= len(old)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(Exception):  # llguidance is missing, for instance: the first request reports it
            self._tokenizers()
        while (pending := self._queue.get()) is not None:
            try:
                pending.compiled = self._compile(pending)
            except EmberlineError as error:
                pending.error = error
            except RecursionError:
                pending.error = BadInput("the grammar is nested too deeply; use a flatter schema", param="grammar")
            except Exception:
                _log.exception("grammar compilation failed", extra={"grammar": pending.digest})
                pending.error = Internal("the engine could not compile this request's grammar")
            pending.ready = True
        self._translator.kill()

    def _compile(self, pending: PendingGrammar) -> _Compiled:
        vocabulary, tokenizer = self._tokenizers()
        from llguidance import LLMatcher, LLParserLimits

        translated = self._translator.translate(pending.encoded)
        for token_id in translated.token_ids:
            if token_id not in vocabulary.special:
                raise BadInput(f"token {token_id} of the grammar is not a special token here", param="grammar")
        source = LLMatcher.grammar_from_lark(translated.source)

        def make() -> Any:
            made = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
            if made.is_error():
                error = made.get_error()[:500]
                _log.warning("llguidance rejected a grammar: %s", error, extra={"grammar": pending.digest})
                raise BadInput("the grammar is too complex; use a simpler schema", param="grammar")
            return made

        return _Compiled(MatcherTemplate(make), Automaton(decode(pending.encoded)), vocabulary)

    def _tokenizers(self) -> tuple[Vocabulary, Any]:
        """Return the vocabulary and llguidance's form of it, built once in a few hundred milliseconds."""
        if self._vocabulary is None or self._tokenizer is None:
            assert self._frame is not None, "the vocabulary is set before the first grammar is requested"
            self._vocabulary = Vocabulary(self._frame, self._vocab_size)
            self._translator.start()
            try:
                self._tokenizer = self._vocabulary.llguidance_tokenizer()
            except ImportError:
                raise BadInput(
                    "this engine does not support grammars: the package llguidance is not installed", param="grammar"
                ) from None
        return self._vocabulary, self._tokenizer
