"""What a grammar with free text and special tokens means, in terms of one without: for tests."""

import re
from functools import cache

from emberline.protocol.grammar import Chars, Expression, Free, Grammar, OneOf, Repeat, Rule, Sequence, Text, Token
from emberline.text.text_model import TextModel

_FIRST = 0x100000  # a private plane: special tokens as characters


def as_characters(model: TextModel, text: str) -> str:
    """Text with its special tokens as characters."""
    pieces = model.tokenizer.split_special(text)
    return "".join(chr(_FIRST + model.tokenizer.special[p]) if at % 2 else p for at, p in enumerate(pieces))


def as_text(model: TextModel, characters: str) -> str:
    return re.sub(
        "[\U00100000-\U0010ffff]", lambda found: model.token_text(ord(found[0]) - _FIRST).decode(), characters
    )


def plain(expression: Expression, free: tuple[str, ...]) -> Expression:
    """With special tokens as characters, and free text as one of these."""
    match expression:
        case Token(token_id):
            return Text(chr(_FIRST + token_id))
        case Free(without):
            marks = [mark for mark in without if isinstance(mark, str)]
            return OneOf(tuple(Text(text) for text in free if not any(mark in text for mark in marks)))
        case Sequence(items):
            return Sequence(tuple(plain(item, free) for item in items))
        case OneOf(options):
            return OneOf(tuple(plain(option, free) for option in options))
        case Repeat(item, least, most):
            return Repeat(plain(item, free), least, most)
        case _:
            return expression


def as_expression(part: str | Expression) -> Expression:
    return Text(part) if isinstance(part, str) else part


def plain_grammar(grammar: Grammar, free: tuple[str, ...]) -> Grammar:
    return Grammar(tuple(plain(rule, free) for rule in grammar.rules))


def matches(grammar: Grammar, text: str) -> bool:
    """Whether a text, with special tokens as characters, belongs to the grammar: by following every reading."""

    @cache
    def rule_ends(number: int, start: int) -> frozenset[int]:
        return ends(grammar.rules[number], start)

    def one_after_another(items: tuple[Expression, ...], start: int) -> frozenset[int]:
        places = frozenset((start,))
        for item in items:
            places = frozenset(end for place in places for end in ends(item, place))
        return places

    def free_ends(free: Free, start: int) -> frozenset[int]:
        without, not_first = (tuple(map(as_expression, parts)) for parts in (free.without, free.not_first))
        begun = {end for part in not_first for end in ends(part, start)}
        last, excluded = start, set[int]()
        while last < len(text) and ord(text[last]) < _FIRST and last + 1 not in begun:
            excluded.update(end for part in without for end in ends(part, last))
            if last + 1 in excluded:
                break
            last += 1
        return frozenset(range(start, last + 1))

    def repeat_ends(item: Expression, least: int, most: int | None, start: int) -> frozenset[int]:
        places, found, n = frozenset((start,)), frozenset((start,) if least == 0 else ()), 0
        while places and (most is None or n < most):
            places = frozenset(end for place in places for end in ends(item, place))
            n += 1
            if n >= least:
                if places <= found:
                    break
                found |= places
        return found

    def ends(expression: Expression, start: int) -> frozenset[int]:
        match expression:
            case Text(literal):
                return frozenset((start + len(literal),)) if text.startswith(literal, start) else frozenset()
            case Token(token_id):
                return ends(Text(chr(_FIRST + token_id)), start)
            case Chars(ranges):
                inside = start < len(text) and any(low <= ord(text[start]) <= high for low, high in ranges)
                return frozenset((start + 1,)) if inside else frozenset()
            case Free():
                return free_ends(expression, start)
            case Rule(number):
                return rule_ends(number, start)
            case Sequence(items):
                return one_after_another(items, start)
            case OneOf(options):
                return frozenset(end for option in options for end in ends(option, start))
            case Repeat(item, least, most):
                return repeat_ends(item, least, most, start)

    return len(text) in rule_ends(0, 0)
