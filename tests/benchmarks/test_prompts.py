"""Random prompts have exactly the length asked for, whatever the template adds."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prompts import Message, Prompts, single_token_words

WORDS = [" alpha", " beta", " gamma", " delta"]


def count(messages: Sequence[Message]) -> int:
    """A template of four tokens around each message and three for the answer's start; an odd one merges at an edge."""
    total = 3
    for message in messages:
        words = message["content"].split()
        total += 4 + len(words) - (words[0] == "beta")
    return total


@given(seed=st.text(max_size=5), n=st.integers(20, 300))
def test_message_has_the_requested_length(seed: str, n: int) -> None:
    prompts = Prompts(WORDS, count, seed)
    system = prompts.system(n)
    assert count([system]) == n
    user = prompts.user(50, [system])
    assert count([system, user]) == n + 50


def test_prompts_follow_from_the_seed() -> None:
    draw = [Prompts(WORDS, count, seed).user(40) for seed in ("a", "a", "b")]
    assert draw[0] == draw[1] != draw[2]


class TinyTokenizer:
    """Three texts, of which the tokenizer itself splits the last."""

    vocab_size = 4
    texts = (b" whole", b" Upper", b"nospace", b" split")

    def token_text(self, token_id: int) -> bytes:
        return self.texts[token_id]

    def encode(self, text: str, special: bool) -> bytes:
        return b"\0\0\0\0" * (4 if " split" in text else 3)


def test_only_single_token_words_are_used() -> None:
    assert single_token_words(TinyTokenizer()) == [" whole"]
