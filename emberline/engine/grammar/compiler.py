"""Grammars that were compiled, and those being compiled: in a thread, so that no step waits for one."""

import hashlib
import logging
import queue
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from emberline.engine.grammar import validation
from emberline.engine.grammar.grammar_automaton import Automaton
from emberline.engine.grammar.guide import GrammarGuide
from emberline.engine.grammar.lark import to_lark
from emberline.engine.grammar.matcher import LIMITS, Prototype
from emberline.engine.grammar.vocabulary import Vocabulary, digest
from emberline.protocol.errors import BadInput, EmberlineError, Internal, Overloaded
from emberline.protocol.frames import Vocabulary as Frame
from emberline.protocol.grammar import Grammar, Token, walk

MAX_KEPT = 64
MAX_KEPT_BYTES = 32 << 20  # of encoded grammars
MAX_WAITING = 256
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Compiled:
    prototype: Prototype
    automaton: Automaton
    vocabulary: Vocabulary


class Pending:
    """A grammar on its way. `ready` once it is compiled or has failed."""

    def __init__(self, encoded: bytes) -> None:
        self.encoded = encoded
        self.digest = hashlib.blake2b(encoded, digest_size=8).hexdigest()
        self.compiled: _Compiled | None = None
        self.error: EmberlineError | None = None
        self.ready = False

    def guide(self) -> GrammarGuide:
        """For one more sequence; raises why there is none."""
        if self.error is not None:
            raise self.error
        assert self.compiled is not None, "asked once it is ready"
        return GrammarGuide(self.compiled.prototype, self.compiled.automaton, self.compiled.vocabulary, self.digest)


class Grammars:
    """One per engine. `request` and `learn` are called by the step loop; the thread starts with the first grammar."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._frame: Frame | None = None
        self._digest = b""
        self._kept: OrderedDict[bytes, Pending] = OrderedDict()
        self._n_kept_bytes = 0
        self._vocabulary: Vocabulary | None = None  # from here on the thread's own
        self._library: Any = None
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()  # None: be ready for the first
        self._thread: threading.Thread | None = None

    def learn(self, frame: Frame) -> None:
        """What tokens stand for. The first frame counts; another that differs is refused."""
        if len(frame.tokens) > self._vocab_size:
            n = len(frame.tokens)
            raise BadInput(f"the vocabulary has {n} tokens, the model {self._vocab_size}", param="vocabulary")
        if self._frame is None:
            self._frame, self._digest = frame, digest(frame)
            self._put(None)
        elif self._digest != digest(frame):
            raise BadInput("this vocabulary differs from the one that the engine has learned", param="vocabulary")

    def request(self, encoded: bytes) -> Pending:
        """The compiled grammar, now or soon."""
        if self._frame is None:
            raise BadInput("a grammar needs the model's vocabulary, which was not sent", param="grammar")
        if len(encoded) > validation.MAX_BYTES:
            raise BadInput(
                f"the grammar has {len(encoded)} bytes, at most {validation.MAX_BYTES} may be", param="grammar"
            )
        found = self._kept.get(encoded)
        if found is not None:
            self._kept.move_to_end(encoded)
            return found
        if self._queue.qsize() >= MAX_WAITING:
            raise Overloaded("too many grammars wait to be compiled; try again", retry_after_s=1)
        found = Pending(encoded)
        self._keep(found)
        self._put(found)
        return found

    def _put(self, pending: Pending | None) -> None:
        self._queue.put(pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()

    def _keep(self, pending: Pending) -> None:
        if self._kept.pop(pending.encoded, None) is None:
            self._n_kept_bytes += len(pending.encoded)
        self._kept[pending.encoded] = pending
        while len(self._kept) > MAX_KEPT or (self._n_kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
            old, _ = self._kept.popitem(last=False)
            self._n_kept_bytes -= len(old)

    # --- in the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            pending = self._queue.get()
            if pending is None:
                with suppress(BadInput):  # no library: the first grammar's request is told
                    self._library_of()
                continue
            try:
                pending.compiled = self._compile(pending)
            except EmberlineError as error:
                pending.error = error
            except RecursionError:
                pending.error = BadInput("the grammar is nested too deeply; use a flatter schema", param="grammar")
            except Exception:
                _log.exception("a grammar could not be compiled", extra={"grammar": pending.digest})
                pending.error = Internal("the engine could not compile this request's grammar")
            pending.ready = True

    def _compile(self, pending: Pending) -> _Compiled:
        vocabulary, library = self._library_of()
        from llguidance import LLMatcher, LLParserLimits

        grammar = validation.read(pending.encoded)
        self._check_tokens(grammar, vocabulary)
        source = LLMatcher.grammar_from_lark(to_lark(grammar))

        def make() -> Any:
            made = LLMatcher(library, source, log_level=0, limits=LLParserLimits(**LIMITS))
            if made.is_error():
                _log.warning("a grammar was refused: %s", made.get_error()[:500], extra={"grammar": pending.digest})
                raise BadInput("the grammar is too complex to be followed; use a simpler schema", param="grammar")
            return made

        return _Compiled(Prototype(make), Automaton(grammar), vocabulary)

    def _library_of(self) -> tuple[Vocabulary, Any]:
        """The vocabulary, also as the library has it: made once, in a few hundred milliseconds."""
        if self._vocabulary is None or self._library is None:
            assert self._frame is not None, "learned before the first grammar was taken"
            self._vocabulary = Vocabulary(self._frame, self._vocab_size)
            try:
                self._library = self._vocabulary.library()
            except ImportError:
                raise BadInput(
                    "this engine cannot follow grammars: the package llguidance is not installed there", param="grammar"
                ) from None
        return self._vocabulary, self._library

    def _check_tokens(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        for token_id in {part.token_id for part in walk(*grammar.rules) if isinstance(part, Token)}:
            if token_id not in vocabulary.special:
                raise BadInput(f"the grammar names token {token_id}, which is no special token here", param="grammar")
