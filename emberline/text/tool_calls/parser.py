"""Incremental reply parser: token ids in, text, reasoning and tool calls out, however the ids are split.

The ids are decoded to one text in which sentinel characters stand for the special tokens that matter here
(`formats.sentinels`). Text and reasoning are held back while they may become the opening of a call, and so is the white
space before one. A call is emitted once its name is complete and declared; its arguments are emitted as they are
generated. What looks like a call and is none stays text or reasoning, unless the reply was cut off there and could have
become a call: that rest is dropped.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from emberline.protocol.request import Message, Tool
from emberline.text.tokenizers.detokenizer import Detokenizer, MarkerFinder
from emberline.text.tool_calls import loose_calls
from emberline.text.tool_calls.formats import ToolCallFormat, sentinels, with_sentinels
from emberline.text.tool_calls.reasoning import ReasoningFormat
from emberline.text.tool_calls.tagged_arguments import Scanned, TaggedScanner, Tags

HEAD_CHARS = 256  # from the opening of a call to its arguments
TAIL_CHARS = 64  # of the white space and markers that close a call
_NAME = r"(?P<name>[a-zA-Z0-9_.-]{1,64}?)"


class CallPatterns:
    """Patterns of one format: `head` from an opening to the arguments, `next_head` from the end of the call before."""

    def __init__(self, form: ToolCallFormat, sentinels: Mapping[str, str]) -> None:
        self._sentinels = sentinels
        self._form = form
        self.openings = tuple(self._with_sentinels(opening) for opening in form.openings)
        self.alone = form.alone
        self.close = self._with_sentinels(form.close)
        self.separator = form.between.strip()
        number = rf"{re.escape(form.number)}(?P<number>\d{{1,9}})" if form.number else "(?P<number>)"
        prefix = f"(?:{re.escape(form.prefix)})?" if form.prefix else ""
        self.tags = None if form.tags is None else Tags(*map(self._with_sentinels, form.tags))
        self._firsts = ("{",) if form.tags is None else (form.tags.key, form.end)  # what may follow the name
        follows = r"(?=\{)"
        if self.tags is not None:
            follows = f"{_SPACE}(?={re.escape(self.tags.key)}|{self._loose(form.end)})"
        rest = f"{prefix}{_NAME}{number}{self._loose(form.arguments)}{follows}"
        begin = f"(?:{self._loose(form.begin)})?" if form.begin in form.openings else self._loose(form.begin)
        call = self._loose(form.call)
        self.head = re.compile(begin + call + rest)
        self.next_head = re.compile(self._loose(form.between) + call + rest) if self.separator else None
        self.tail = re.compile(self._loose(form.end))

    def may_begin(self, text: str, names: Collection[str]) -> bool:
        """True if the text is a proper prefix of `head` with one of these names."""
        form = self._form
        begins = {form.begin, ""} if form.begin in form.openings else {form.begin}
        return self._is_prefix(text, (begin + form.call for begin in begins), names)

    def may_go_on(self, text: str, names: Collection[str]) -> bool:
        """The same for `next_head`."""
        return self.next_head is not None and self._is_prefix(text, (self._form.between + self._form.call,), names)

    def may_end(self, text: str) -> bool:
        """True if the text is a prefix of `tail`."""
        return _spaceless(self._with_sentinels(self._form.end)).startswith(_spaceless(text))

    def _is_prefix(self, text: str, beginnings: Iterable[str], names: Collection[str]) -> bool:
        form = self._form
        text = _spaceless(text)
        if form.number:  # any number
            text = re.sub(rf"{re.escape(form.number)}\d{{1,9}}", f"{form.number}0", text)
        rest = f"{form.number}0{form.arguments}" if form.number else form.arguments
        return any(
            _spaceless(self._with_sentinels(f"{beginning}{prefix}{name}{rest}{first}")).startswith(text)
            for beginning in beginnings
            for first in self._firsts
            for prefix in {form.prefix, ""}
            for name in names
        )

    def _with_sentinels(self, text: str) -> str:
        return with_sentinels(text, self._sentinels)

    def _loose(self, text: str) -> str:
        """A pattern of the text with any white space around JSON punctuation."""
        parts = re.findall(r"\s+|[{}\[\],:;]|[^\s{}\[\],:;]+", self._with_sentinels(text))
        spaced = [_SPACE if part.isspace() else _around(part) for part in parts]
        return re.sub(r"(?:\\s\*)+", lambda _: _SPACE, "".join(spaced))


_SPACE = r"\s*"


def _spaceless(text: str) -> str:
    return "".join(text.split())


def _around(part: str) -> str:
    return f"{_SPACE}{re.escape(part)}{_SPACE}" if part in "{}[],:;" else re.escape(part)


_OUTSIDE = re.compile(r'["{}\ud800-\udfff]')
_INSIDE = re.compile(r'["\\\ud800-\udfff]')


class ArgumentScanner:
    """Finds the end of a JSON object that arrives in pieces. A sentinel (a special token) ends it anywhere."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str, *, final: bool) -> Scanned:
        end = self.end_of(text)
        n = len(text) if end is None else end
        return Scanned(n, text[:n], end is not None)

    def end_of(self, text: str) -> int | None:
        """The offset at which the object ends; None if it goes on."""
        at = 0
        if self._escaped and text:
            self._escaped = False
            at = 0 if "\ud800" <= text[0] <= "\udfff" else 1
        while (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at)) is not None:
            at = found.end()
            char = found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                if at == len(text):
                    self._escaped = True
                    return None
                at += not "\ud800" <= text[at] <= "\udfff"
            elif char == "{":
                self._depth += 1
            elif char == "}":
                self._depth -= 1
                if self._depth == 0:
                    return at
            else:
                return found.start()
        return None


class TextPiece(NamedTuple):
    """A further piece of the answer."""

    text: str


class ReasoningPiece(NamedTuple):
    """A further piece of the reasoning."""

    text: str


class CallStart(NamedTuple):
    """A call of a declared tool begins; `number` is the index that the model wrote, in families that do."""

    name: str
    number: str


class ArgumentsPiece(NamedTuple):
    """A further piece of the current call's arguments, as the model writes them."""

    text: str


class CallEnd(NamedTuple):
    """The arguments of the current call are complete."""


ReplyPiece = TextPiece | ReasoningPiece | CallStart | ArgumentsPiece | CallEnd


GAP_CHARS = 64  # of white space that is held back before a possible call; more of it is text
_DROP_SENTINELS = dict.fromkeys(range(0xD800, 0xE000))


class ReplyFormat:
    """Markers that the parsers of one model's replies look for; shared by these parsers."""

    def __init__(self, tools: ToolCallFormat | None, reasoning: ReasoningFormat | None) -> None:
        tokens = {**(tools.tokens if tools is not None else {}), **(reasoning.tokens if reasoning is not None else {})}
        self.sentinels = sentinels(tokens)
        self.sentinel_of = {tokens[marker]: sentinel for marker, sentinel in self.sentinels.items()}
        self.calls = CallPatterns(tools, self.sentinels) if tools is not None else None
        self.reasoning_start = with_sentinels(reasoning.start, self.sentinels) if reasoning is not None else ""
        self.reasoning_end = with_sentinels(reasoning.end, self.sentinels) if reasoning is not None else ""
        anywhere = () if self.calls is None or self.calls.alone else self.calls.openings
        self.loose = tools is not None and tools.loose
        self.in_text = MarkerFinder((*anywhere, *loose_calls.MARKERS) if self.loose else anywhere)
        self.in_text_strict = MarkerFinder(anywhere)
        self.in_reasoning = MarkerFinder((self.reasoning_end, *anywhere))


class ReplyParser:
    """Parses one reply. `tools`: those that may be called. `reasoning`: the prompt has begun reasoning (True), has
    ended it (False), or leaves it to the reply (None)."""

    def __init__(
        self,
        form: ReplyFormat,
        detokenizer: Detokenizer,
        tools: Sequence[Tool],
        reasoning: bool | None,
        *,
        loose: bool = True,
    ) -> None:
        """`loose`: calls may be written beside the model's format. The grammar must bind those, too."""
        assert not (reasoning and not form.reasoning_end)
        self.reasoning = bool(reasoning)
        self._form = form
        self._calls = form.calls
        self._names = {tool.name: tool.parameters for tool in tools}
        self._loose = loose and form.loose
        self._detokenizer = detokenizer
        self._held = ""  # decoded, not yet emitted
        self._gap = ""  # white space before a possible call
        self._trim = self.reasoning  # drop the white space that follows
        self._at_start = True  # nothing was emitted yet
        self._cut = False  # the reply ended at max_tokens
        self.lost_tool_call = False  # it was cut off inside a call before the arguments
        self._arguments: ArgumentScanner | TaggedScanner = ArgumentScanner()
        self._end = self._tail  # the state after the arguments of the current call
        may_reason = reasoning is None and form.reasoning_start
        self._state: Callable[[bool, list[ReplyPiece]], bool] = self._before_reasoning if may_reason else self._text

    @property
    def plain(self) -> bool:
        """Only text can follow and nothing is held back: the detokenizer alone suffices."""
        return self._calls is None and self.decided and not (self.reasoning or self._trim or self._held)

    @property
    def decided(self) -> bool:
        """True once it is known whether the reply begins with reasoning."""
        return self._state != self._before_reasoning

    @property
    def in_text(self) -> bool:
        return self._state == self._text and not self.reasoning

    def push(self, ids: Sequence[int]) -> list[ReplyPiece]:
        return self.push_text(self._read(ids))

    def finish(self, *, cut: bool = False) -> list[ReplyPiece]:
        """The rest that was held back. `cut`: the reply ended at max_tokens."""
        self._cut = cut
        pieces = self.push_text(self._detokenizer.finish())
        while self._state(True, pieces):
            pass
        return joined(pieces)

    def push_text(self, text: str) -> list[ReplyPiece]:
        """Like `push`, for decoded text with sentinels."""
        if not text:
            return []
        self._held += text
        pieces: list[ReplyPiece] = []
        while self._state(False, pieces):
            pass
        return pieces if len(pieces) < 2 else joined(pieces)

    def _read(self, ids: Sequence[int]) -> str:
        sign_of = self._form.sentinel_of
        if sign_of.keys().isdisjoint(ids):
            return self._detokenizer.push(ids)
        texts: list[str] = []
        for token_id in ids:
            if token_id in sign_of:
                texts += [self._detokenizer.finish(), sign_of[token_id]]
            else:
                texts.append(self._detokenizer.push((token_id,)))
        return "".join(texts)

    # --- states: each consumes what it can of `_held` and returns whether another state may continue -----------------

    def _before_reasoning(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """State in which it is unknown whether the reply begins with reasoning."""
        start, text = self._form.reasoning_start, self._held.lstrip()
        if len(self._held) - len(text) <= GAP_CHARS:
            if text.startswith(start):
                self._held = text[len(start) :]
                self.reasoning = self._trim = True
            elif start.startswith(text) and not final:
                return False
        self._state = self._text
        return True

    def _text(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """Text or reasoning."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        if self._call_only_possible:
            return self._text_or_call_only(final)
        markers = self._markers
        if markers is None:
            self._out(len(self._held), pieces)
            return False
        found = markers.find(self._held)
        if found is None:
            end = len(self._held)
            self._out(end if final else _before_spaces(self._held, end - markers.n_undecided(self._held)), pieces)
            return False
        body = _before_spaces(self._held, found.start())
        gap = self._held[body : found.start()]
        self._out(body, pieces)
        if found[0] == self._form.reasoning_end and self.reasoning:
            self._held = self._held[len(gap) + len(found[0]) :]
            self.reasoning, self._trim = False, True
        else:
            self._held, self._gap = self._held[len(gap) :], gap
            self._state = self._loose_head if found[0] in loose_calls.MARKERS else self._head
        return True

    def _loose_head(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """Parse from what may be a call beside the format to its arguments."""
        found = loose_calls.read_head(self._held, self._names)
        if found is not None:
            self._begin(found.name, "", found.end, pieces)
            self._arguments, self._end = ArgumentScanner(), self._loose_tail
            return True
        may_become = loose_calls.may_become_head(self._held, self._names)
        if may_become and not final:
            return False
        if may_become and self._cut and loose_calls.begins_a_call(self._held):
            return self._drop_call()
        marker = next(marker for marker in loose_calls.MARKERS if self._held.startswith(marker))
        self._as_text(marker, pieces)
        return True

    def _loose_tail(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        end = loose_calls.tail_end(self._held, final=final)
        if end is None:
            return False
        self._held = self._held[end:]
        self._trim = True
        self._state = self._text
        return True

    def _text_or_call_only(self, final: bool) -> bool:
        """State of formats whose calls are the whole reply: only its beginning can be a call."""
        assert self._calls is not None
        (opening,) = self._calls.openings
        text = self._held.lstrip()
        gap = self._held[: len(self._held) - len(text)]
        if len(gap) <= GAP_CHARS and text.startswith(opening):
            self._held, self._gap = text, gap
            self._state = self._head
        elif len(gap) <= GAP_CHARS and opening.startswith(text) and not final:
            return False
        else:
            self._at_start = False
        return True

    def _head(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """Parse from an opening to the arguments."""
        assert self._calls is not None
        found = self._calls.head.match(self._held[:HEAD_CHARS])
        if found is not None and found["name"] in self._names:
            self._begin(found["name"], found["number"], found.end(), pieces)
            return True
        if found is None and len(self._held) < HEAD_CHARS and not final:
            return False
        if found is None and self._cut and self._calls.may_begin(self._held, self._names):
            return self._drop_call()
        self._as_text(next(each for each in self._calls.openings if self._held.startswith(each)), pieces)
        return True

    def _call_arguments(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        found = self._arguments.push(self._held, final=final and not self._cut)
        self._held = self._held[found.n :]
        if found.json:
            pieces.append(ArgumentsPiece(found.json))
        if not found.ended:
            return False
        pieces.append(CallEnd())
        self._state = self._end
        return True

    def _tail(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """The end of a call. A model that leaves it out has called all the same."""
        assert self._calls is not None
        found = self._calls.tail.match(self._held[:TAIL_CHARS])
        if found is None and len(self._held) < TAIL_CHARS and not final:
            return False
        if found is None and self._cut and self._calls.may_end(self._held):
            self._held = ""
            return False
        self._held = self._held[found.end() if found is not None else 0 :]
        self._trim = True
        self._state = self._after
        return True

    def _after(self, final: bool, pieces: list[ReplyPiece]) -> bool:
        """Another call without an opening of its own, or the end of all calls."""
        calls = self._calls
        assert calls is not None
        self._held = self._held.lstrip()
        if not self._held and not final:
            return False
        next_head = calls.next_head and calls.next_head.match(self._held[:HEAD_CHARS])
        if next_head and next_head["name"] in self._names:
            self._begin(next_head["name"], next_head["number"], next_head.end(), pieces)
            return True
        if calls.close and self._held.startswith(calls.close):
            self._held = self._held[len(calls.close) :]
        elif not final and self._may_continue(calls):
            return False
        elif self._cut and self._held and calls.may_go_on(self._held, self._names):
            return self._drop_call()
        self._state = self._text
        return True

    def _may_continue(self, calls: CallPatterns) -> bool:
        if calls.close.startswith(self._held):
            return True
        return calls.next_head is not None and self._held.startswith(calls.separator) and len(self._held) < HEAD_CHARS

    # --- helpers of the states ----------------------------------------------------------------------------------------

    @property
    def _call_only_possible(self) -> bool:
        return self._calls is not None and self._calls.alone and self._at_start and not self.reasoning

    @property
    def _markers(self) -> MarkerFinder | None:
        if self.reasoning:
            return self._form.in_reasoning
        if self._calls is None or self._calls.alone:
            return None
        return self._form.in_text if self._loose else self._form.in_text_strict

    def _as_text(self, opening: str, pieces: list[ReplyPiece]) -> None:
        """Emit an opening that begins no call, and the white space before it."""
        self._held, self._gap = self._gap + self._held, ""
        self._out(len(self._held) - len(self._held.lstrip()) + len(opening), pieces)
        self._state = self._text

    def _drop_call(self) -> bool:
        """A call that was cut off is neither a call nor text."""
        self._held, self._gap, self.lost_tool_call = "", "", True
        return False

    def _begin(self, name: str, number: str, end: int, pieces: list[ReplyPiece]) -> None:
        pieces.append(CallStart(name, number))
        self._held, self._gap = self._held[end:], ""
        self.reasoning = self._at_start = False
        tags = self._calls.tags if self._calls is not None else None
        self._arguments = ArgumentScanner() if tags is None else TaggedScanner(tags, self._names[name])
        self._end = self._tail
        self._state = self._call_arguments

    def _out(self, n: int, pieces: list[ReplyPiece]) -> None:
        """Emits the first n held characters, without sentinels."""
        text = self._held[:n].translate(_DROP_SENTINELS) if self._form.sentinel_of else self._held[:n]
        self._held = self._held[n:]
        if text:
            pieces.append(ReasoningPiece(text) if self.reasoning else TextPiece(text))
            self._at_start = self._at_start and self.reasoning


def _before_spaces(text: str, end: int) -> int:
    """The offset at which the white space before `end` begins."""
    first = max(0, end - GAP_CHARS)
    while end > first and text[end - 1].isspace():
        end -= 1
    return end


def joined(pieces: list[ReplyPiece]) -> list[ReplyPiece]:
    """Adjacent pieces of one kind joined."""
    joined: list[ReplyPiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, TextPiece | ReasoningPiece | ArgumentsPiece) and type(piece) is type(last):
            joined[-1] = type(piece)(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


class ParsedCall(msgspec.Struct):
    name: str
    number: str  # the index that the model wrote, in families that do
    arguments: str = ""


class Reply(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = []

    def add(self, pieces: Iterable[ReplyPiece]) -> "Reply":
        for piece in pieces:
            if isinstance(piece, TextPiece):
                self.text += piece.text
            elif isinstance(piece, ReasoningPiece):
                self.reasoning += piece.text
            elif isinstance(piece, CallStart):
                self.calls.append(ParsedCall(piece.name, piece.number))
            elif isinstance(piece, ArgumentsPiece):
                self.calls[-1].arguments += piece.text
        return self

    def says(self, message: Message) -> bool:
        """True if the message equals this reply: same text and reasoning, and calls with equal arguments."""
        if self.text != message.content or self.reasoning != (message.reasoning or ""):
            return False
        ours = [(call.name, parsed(call.arguments)) for call in self.calls]
        return ours == [(call.name, parsed(call.arguments)) for call in message.tool_calls]


def parsed(arguments: str) -> object:
    """Parsed JSON, so that white space and key order do not matter; text that is not JSON unchanged."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
