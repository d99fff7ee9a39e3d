"""Fresh random prompts of an exact length: words that are one token each, counted by the model's own tokenizer."""

import random
import re
from collections.abc import Callable, Sequence
from typing import Protocol

Message = dict[str, str]

_WORD = re.compile(rb" [a-z]{3,12}")


class Tokenizer(Protocol):
    """The part of `emberline.text.text_model.TextModel` that is used here."""

    @property
    def vocab_size(self) -> int: ...
    def token_text(self, token_id: int, /) -> bytes: ...
    def encode(self, text: str, special: bool) -> bytes: ...


class Prompts:
    """Draws prompts from one seed. `count` returns the tokens of a conversation, template included."""

    def __init__(self, words: Sequence[str], count: Callable[[Sequence[Message]], int], seed: str) -> None:
        self._words = words
        self._count = count
        self._random = random.Random(seed)

    def user(self, n_tokens: int, before: Sequence[Message] = ()) -> Message:
        """A user message that extends the conversation `before` it by exactly `n_tokens`."""
        return self._message("user", n_tokens, before)

    def system(self, n_tokens: int) -> Message:
        return self._message("system", n_tokens, ())

    def _message(self, role: str, n_tokens: int, before: Sequence[Message]) -> Message:
        target = n_tokens + (self._count(before) if before else 0)
        words = self._random.choices(self._words, k=n_tokens)
        # One pass corrects for the template, a second for the first word, which has no space before it and may be more
        # than one token.
        for _ in range(4):
            message = {"role": role, "content": "".join(words).lstrip()}
            surplus = self._count([*before, message]) - target
            if surplus == 0:
                return message
            assert surplus < len(words), f"{n_tokens} tokens do not hold the template's own"
            words = words[:-surplus] if surplus > 0 else words + self._random.choices(self._words, k=-surplus)
        raise AssertionError(f"no random text of exactly {n_tokens} tokens found")


def single_token_words(tokenizer: Tokenizer) -> list[str]:
    """Lower-case words with a space before them that are one token each, in vocabulary order."""
    texts = (tokenizer.token_text(i) for i in range(tokenizer.vocab_size))
    words = [text.decode() for text in texts if _WORD.fullmatch(text)]
    return [word for word in words if len(tokenizer.encode("a" + word + " a", False)) == 4 * 3]
