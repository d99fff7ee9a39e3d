"""Tokenising word by word from memory: the same ids as the whole text at once, an order of magnitude sooner.

Text is cut only where no token can reach across: before a single space between two words, and after a single line
break between two words.
What lies between two cuts is tokenised once and remembered, already packed. Where much of a text is new, it is
tokenised at once all the same, which costs less than as many words, and the words it uses most are learned.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate

MAX_WORDS = 1 << 15
MAX_WORD_CHARS = 48  # longer ones (data, paths) hardly come again
CHARS_PER_WORD = 40  # of text at once, for the time that a single word takes: 12 µs
LEARNED_CHARS = 256  # of text at once, for which a word is learned
FEW = 16  # words that are learned in any case

Encode = Callable[[str], bytes]


class Words:
    """`encode` tokenises one piece of ordinary text; `uncuttable` are characters that a token joins to a space."""

    def __init__(self, encode: Encode, uncuttable: Iterable[str] = ()) -> None:
        self._encode = encode
        self._known: dict[str, bytes] = {}
        self._cut = _cutter("".join(uncuttable)).findall

    def encode(self, text: str) -> bytes:
        known = self._known
        words: list[str] = self._cut(text)
        try:
            return b"".join([known[word] for word in words])
        except KeyError:
            new = Counter(word for word in words if word not in known)
        if len(new) > FEW and len(new) * CHARS_PER_WORD > len(text):
            for word, _ in new.most_common(FEW + len(text) // LEARNED_CHARS):
                self._learn(word)
            return self._encode(text)
        return b"".join([known.get(word) or self._learn(word) for word in words])

    def cuts(self, token: str) -> bool:
        """Whether text that contains this could be cut in the middle of it."""
        ends = set(accumulate(map(len, self._cut(f"\0{token}\0"))))
        return not ends.isdisjoint(range(2, len(token) + 1))

    def _learn(self, word: str) -> bytes:
        ids = self._encode(word)
        if len(word) <= MAX_WORD_CHARS:
            if len(self._known) >= MAX_WORDS:
                self._known.clear()
            self._known[word] = ids
        return ids


def _cutter(uncuttable: str) -> re.Pattern[str]:
    """Finds words: an optional leading space, text, and on over any white space that is not a cut.

    A cut lies before ` x` when what precedes is neither white space nor uncuttable, and in `x\\ny` before `y`.
    What has matched never has to be given back for the rest to match, so nothing is kept for trying again. The groups
    are in an atomic one, for Python before 3.11.5 loses characters in possessive repeats of groups.
    """
    no_cut = f"(?<=[{re.escape(uncuttable)}]) (?=\\S)|" if uncuttable else ""
    gap = rf"(?:{no_cut}[^\S ]\s*+| \s++| \Z)"
    return re.compile(rf"(?: ?\S++|\s++(?:(?<!\S\n)\S++)?)(?>(?:{gap}(?:(?<!\S\n)\S++)?)*)")
