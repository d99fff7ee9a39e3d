"""A reply's token ids to text, reasoning and calls, as they come; however they are cut, the same comes out.

The ids are read as one text, in which the special tokens that mean something here are characters of their own
(form.signs). Text and reasoning are held back where they may become an opening, and white space where it may stand
before one. A call goes out once its name is known and declared; its arguments go out as they are written. What looks
like a call and is none stays what it stands in, text or reasoning; unless the reply was cut there, and more of it could
have made it one: nobody's text ends in half a call.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from emberline.protocol.request import Message
from emberline.text.detokenizer import Detokenizer
from emberline.text.tool_calls.formats import ToolForm, signed, signs
from emberline.text.tool_calls.reasoning import ThinkForm

HEAD_CHARS = 256  # a call's name stands within so many characters of its opening
TAIL_CHARS = 64  # and what closes it, of its arguments
_NAME = r"(?P<name>[a-zA-Z0-9_.-]{1,64}?)"


class Marks:
    """Some strings to find in text that comes in pieces."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, marks)) or r"(?!)")
        prefixes = {mark[:n] for mark in marks for n in range(1, len(mark))}
        self._prefixes = sorted(prefixes, key=len, reverse=True)
        self._last_chars = frozenset(prefix[-1] for prefix in prefixes)

    def find(self, text: str) -> re.Match[str] | None:
        return self._pattern.search(text)

    def n_unsure(self, text: str) -> int:
        """How many of the last characters may be the beginning of a mark."""
        if not text or text[-1] not in self._last_chars:
            return 0
        return next((len(prefix) for prefix in self._prefixes if text.endswith(prefix)), 0)


class CallPatterns:
    """`head` goes from an opening, `again` from the end of the call before, to where the arguments begin."""

    def __init__(self, form: ToolForm, signs: Mapping[str, str]) -> None:
        self._signs = signs
        self._form = form
        self.openings = tuple(self._signed(opening) for opening in form.openings)
        self.alone = form.alone
        self.close = self._signed(form.close)
        self.separator = form.between.strip()
        number = rf"{re.escape(form.number)}(?P<number>\d{{1,9}})" if form.number else "(?P<number>)"
        prefix = f"(?:{re.escape(form.prefix)})?" if form.prefix else ""
        rest = f"{prefix}{_NAME}{number}{self._loose(form.arguments)}(?=\\{{)"
        begin = f"(?:{self._loose(form.begin)})?" if form.begin in form.openings else self._loose(form.begin)
        call = self._loose(form.call)
        self.head = re.compile(begin + call + rest)
        self.again = re.compile(self._loose(form.between) + call + rest) if self.separator else None
        self.tail = re.compile(self._loose(form.end))

    def may_begin(self, text: str, names: Collection[str]) -> bool:
        """Whether more behind the text could make it `head`, with one of the names."""
        form = self._form
        begins = {form.begin, ""} if form.begin in form.openings else {form.begin}
        return self._may_become(text, (begin + form.call for begin in begins), names)

    def may_go_on(self, text: str, names: Collection[str]) -> bool:
        """The same for `again`."""
        return self.again is not None and self._may_become(text, (self._form.between + self._form.call,), names)

    def may_end(self, text: str) -> bool:
        """Whether more behind the text could make it `tail`."""
        return _spaceless(self._signed(self._form.end)).startswith(_spaceless(text))

    def _may_become(self, text: str, beginnings: Iterable[str], names: Collection[str]) -> bool:
        form = self._form
        text = _spaceless(text)
        if form.number:  # any number will do
            text = re.sub(rf"{re.escape(form.number)}\d{{1,9}}", f"{form.number}0", text)
        rest = f"{form.number}0{form.arguments}" if form.number else form.arguments
        return any(
            _spaceless(self._signed(f"{beginning}{prefix}{name}{rest}{{")).startswith(text)
            for beginning in beginnings
            for prefix in {form.prefix, ""}
            for name in names
        )

    def _signed(self, text: str) -> str:
        return signed(text, self._signs)

    def _loose(self, text: str) -> str:
        """The text with any white space around JSON's signs."""
        parts = re.findall(r"\s+|[{}\[\],:;]|[^\s{}\[\],:;]+", self._signed(text))
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
    """Reads a JSON object piece by piece. A sign (a lone surrogate: a special token) ends it wherever it stands."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """Where in the text the object ends; None: beyond it."""
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


class Said(NamedTuple):
    """Text for the user."""

    text: str


class Thought(NamedTuple):
    """Reasoning."""

    text: str


class CallBegun(NamedTuple):
    """A call to a declared tool; `number` is the model's own for it, where the family writes one."""

    name: str
    number: str


class Argued(NamedTuple):
    """More of the arguments of the call that was begun last, as the model writes them."""

    text: str


class CallEnded(NamedTuple):
    """The arguments of the call that was begun last are complete."""


Piece = Said | Thought | CallBegun | Argued | CallEnded


GAP_CHARS = 64  # of white space may be held back; more of it is text
_DROP_SIGNS = dict.fromkeys(range(0xD800, 0xE000))


class ReplyForm:
    """What to look for in a model's replies; shared by all of them. Made by `TextModel`."""

    def __init__(self, tools: ToolForm | None, thinking: ThinkForm | None) -> None:
        tokens = {**(tools.tokens if tools is not None else {}), **(thinking.tokens if thinking is not None else {})}
        self.signs = signs(tokens)
        self.sign_of = {tokens[mark]: sign for mark, sign in self.signs.items()}
        self.calls = CallPatterns(tools, self.signs) if tools is not None else None
        self.think_start = signed(thinking.start, self.signs) if thinking is not None else ""
        self.think_end = signed(thinking.end, self.signs) if thinking is not None else ""
        anywhere = () if self.calls is None or self.calls.alone else self.calls.openings
        self.in_text = Marks(anywhere)
        self.in_thought = Marks((self.think_end, *anywhere))


class ReplyParser:
    """One reply's. `names`: the tools that may be called. `thinking`: the prompt has begun it (True), has ended it
    (False), or leaves it to the reply (None)."""

    def __init__(
        self, form: ReplyForm, detokenizer: Detokenizer, names: Collection[str], thinking: bool | None
    ) -> None:
        assert not (thinking and not form.think_end)
        self.thinking = bool(thinking)
        self._form = form
        self._calls = form.calls
        self._names = names
        self._detokenizer = detokenizer
        self._held = ""  # read and not yet gone out
        self._gap = ""  # white space before what may be a call
        self._trim = self.thinking  # white space that comes next is nobody's
        self._at_start = True  # nothing has gone out
        self._cut = False  # the reply ended because there was no room for more of it
        self.lost_call = False  # it was cut before a call's arguments began
        self._arguments = ArgumentScanner()
        can_think = thinking is None and form.think_start
        self._state: Callable[[bool, list[Piece]], bool] = self._before if can_think else self._text

    @property
    def plain(self) -> bool:
        """Only text follows, and nothing is held: the detokenizer alone would do."""
        return self._calls is None and self.decided and not (self.thinking or self._trim or self._held)

    @property
    def decided(self) -> bool:
        """Whether the reply begins with reasoning is known."""
        return self._state != self._before

    @property
    def in_text(self) -> bool:
        return self._state == self._text and not self.thinking

    def push(self, ids: Sequence[int]) -> list[Piece]:
        return self.push_text(self._read(ids))

    def finish(self, *, cut: bool = False) -> list[Piece]:
        """What was held back, now that nothing follows. `cut`: more would have, had there been room."""
        self._cut = cut
        pieces = self.push_text(self._detokenizer.finish())
        while self._state(True, pieces):
            pass
        return _joined(pieces)

    def push_text(self, text: str) -> list[Piece]:
        """Text with signs, as `_read` makes it."""
        if not text:
            return []
        self._held += text
        pieces: list[Piece] = []
        while self._state(False, pieces):
            pass
        return pieces if len(pieces) < 2 else _joined(pieces)

    def _read(self, ids: Sequence[int]) -> str:
        sign_of = self._form.sign_of
        if sign_of.keys().isdisjoint(ids):
            return self._detokenizer.push(ids)
        texts: list[str] = []
        for token_id in ids:
            if token_id in sign_of:
                texts += [self._detokenizer.finish(), sign_of[token_id]]
            else:
                texts.append(self._detokenizer.push((token_id,)))
        return "".join(texts)

    # --- the states: each takes what it can out of `_held`, and tells whether another may go on with it ---------------

    def _before(self, final: bool, pieces: list[Piece]) -> bool:
        """Whether the reply begins with reasoning is not known yet."""
        start, text = self._form.think_start, self._held.lstrip()
        if len(self._held) - len(text) <= GAP_CHARS:
            if text.startswith(start):
                self._held = text[len(start) :]
                self.thinking = self._trim = True
            elif start.startswith(text) and not final:
                return False
        self._state = self._text
        return True

    def _text(self, final: bool, pieces: list[Piece]) -> bool:
        """Text or reasoning."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        if self._alone_possible:
            return self._text_or_lone_call(final)
        marks = self._marks
        if marks is None:
            self._out(len(self._held), pieces)
            return False
        found = marks.find(self._held)
        if found is None:
            end = len(self._held)
            self._out(end if final else _automaton_spaceless(self._held, end - marks.n_unsure(self._held)), pieces)
            return False
        body = _automaton_spaceless(self._held, found.start())
        gap = self._held[body : found.start()]
        self._out(body, pieces)
        if found[0] == self._form.think_end and self.thinking:
            self._held = self._held[len(gap) + len(found[0]) :]
            self.thinking, self._trim = False, True
        else:
            self._held, self._gap = self._held[len(gap) :], gap
            self._state = self._head
        return True

    def _text_or_lone_call(self, final: bool) -> bool:
        """A family whose calls are whole replies: only the beginning can be one."""
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

    def _head(self, final: bool, pieces: list[Piece]) -> bool:
        """From an opening to where the arguments begin."""
        assert self._calls is not None
        found = self._calls.head.match(self._held[:HEAD_CHARS])
        if found is not None and found["name"] in self._names:
            self._begin(found["name"], found["number"], found.end(), pieces)
            return True
        if found is None and len(self._held) < HEAD_CHARS and not final:
            return False
        if found is None and self._cut and self._calls.may_begin(self._held, self._names):
            return self._lose_call()
        opening = next(opening for opening in self._calls.openings if self._held.startswith(opening))
        self._held, self._gap = self._gap + self._held, ""
        self._out(len(self._held) - len(self._held.lstrip()) + len(opening), pieces)
        self._state = self._text
        return True

    def _argue(self, final: bool, pieces: list[Piece]) -> bool:
        end = self._arguments.push(self._held)
        n = len(self._held) if end is None else end
        if n:
            pieces.append(Argued(self._held[:n]))
            self._held = self._held[n:]
        if end is None:
            return False
        pieces.append(CallEnded())
        self._state = self._tail
        return True

    def _tail(self, final: bool, pieces: list[Piece]) -> bool:
        """What closes a call. A model that left it out has called all the same."""
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

    def _after(self, final: bool, pieces: list[Piece]) -> bool:
        """Another call without an opening of its own, or what closes all of them."""
        calls = self._calls
        assert calls is not None
        self._held = self._held.lstrip()
        if not self._held and not final:
            return False
        again = calls.again and calls.again.match(self._held[:HEAD_CHARS])
        if again and again["name"] in self._names:
            self._begin(again["name"], again["number"], again.end(), pieces)
            return True
        if calls.close and self._held.startswith(calls.close):
            self._held = self._held[len(calls.close) :]
        elif not final and self._may_continue(calls):
            return False
        elif self._cut and self._held and calls.may_go_on(self._held, self._names):
            return self._lose_call()
        self._state = self._text
        return True

    def _may_continue(self, calls: CallPatterns) -> bool:
        if calls.close.startswith(self._held):
            return True
        return calls.again is not None and self._held.startswith(calls.separator) and len(self._held) < HEAD_CHARS

    # --- their parts --------------------------------------------------------------------------------------------------

    @property
    def _alone_possible(self) -> bool:
        return self._calls is not None and self._calls.alone and self._at_start and not self.thinking

    @property
    def _marks(self) -> Marks | None:
        if self.thinking:
            return self._form.in_thought
        return self._form.in_text if self._calls is not None and not self._calls.alone else None

    def _lose_call(self) -> bool:
        """Half a call is neither a call nor text."""
        self._held, self._gap, self.lost_call = "", "", True
        return False

    def _begin(self, name: str, number: str, end: int, pieces: list[Piece]) -> None:
        pieces.append(CallBegun(name, number))
        self._held, self._gap = self._held[end:], ""
        self.thinking = self._at_start = False
        self._arguments = ArgumentScanner()
        self._state = self._argue

    def _out(self, n: int, pieces: list[Piece]) -> None:
        """The first n held characters, to whom they are for. Special tokens stand for no text."""
        text = self._held[:n].translate(_DROP_SIGNS) if self._form.sign_of else self._held[:n]
        self._held = self._held[n:]
        if text:
            pieces.append(Thought(text) if self.thinking else Said(text))
            self._at_start = self._at_start and self.thinking


def _automaton_spaceless(text: str, end: int) -> int:
    """Where the white space before `end` begins."""
    first = max(0, end - GAP_CHARS)
    while end > first and text[end - 1].isspace():
        end -= 1
    return end


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Said) and isinstance(last, Said):
            joined[-1] = Said(last.text + piece.text)
        elif isinstance(piece, Thought) and isinstance(last, Thought):
            joined[-1] = Thought(last.text + piece.text)
        elif isinstance(piece, Argued) and isinstance(last, Argued):
            joined[-1] = Argued(last.text + piece.text)
        else:
            joined.append(piece)
    return joined


class Call(msgspec.Struct):
    name: str
    number: str  # the model's own, where its family writes one
    arguments: str = ""


class Reply(msgspec.Struct):
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []

    def add(self, pieces: Iterable[Piece]) -> "Reply":
        for piece in pieces:
            if isinstance(piece, Said):
                self.text += piece.text
            elif isinstance(piece, Thought):
                self.reasoning += piece.text
            elif isinstance(piece, CallBegun):
                self.calls.append(Call(piece.name, piece.number))
            elif isinstance(piece, Argued):
                self.calls[-1].arguments += piece.text
        return self

    def says(self, message: Message) -> bool:
        """Whether the message is this reply: the same text and reasoning, and calls that mean the same."""
        if self.text != message.content or self.reasoning != (message.reasoning or ""):
            return False
        ours = [(call.name, parsed(call.arguments)) for call in self.calls]
        return ours == [(call.name, parsed(call.arguments)) for call in message.tool_calls]


def parsed(arguments: str) -> object:
    """JSON as it means, whatever its spaces and the order of its keys; text that is none, as it is."""
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
