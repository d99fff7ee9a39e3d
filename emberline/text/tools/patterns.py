"""A tool form as patterns over a reply's text. The structure around names and arguments may have any white space."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from emberline.text.tools.form import ToolForm, signed

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
