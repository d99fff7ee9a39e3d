"""Grammars, vocabularies and a brute-force reading of grammars, for the tests here."""

from functools import cache
from itertools import product

from hypothesis import strategies as st

from emberline.protocol.frames import Vocabulary as Frame
from emberline.protocol.grammar import Chars, Free, Grammar, OneOf, Repeat, Rule, Sequence, Text, Token

SPECIAL = 300
END_ID = 301


def seq(*items):
    return Sequence(items)


def choice(*options):
    return OneOf(options)


DIGIT = Chars(((48, 57),))
PLAIN = Chars(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
ESCAPE = seq(Text("\\"), Chars(((34, 34), (92, 92), (110, 110))))
STRING = seq(Text('"'), Repeat(choice(PLAIN, ESCAPE)), Text('"'))
INTEGER = seq(Repeat(Text("-"), 0, 1), choice(Text("0"), seq(Chars(((49, 57),)), Repeat(DIGIT, 0, 15))))
NUMBER = seq(INTEGER, Repeat(seq(Text("."), Repeat(DIGIT, 1, 15)), 0, 1))


def array(item):
    return seq(Text("["), Repeat(seq(item, Repeat(seq(Text(","), item))), 0, 1), Text("]"))


NUMBERS = Grammar((array(NUMBER),))
LINKED = Grammar((Rule(1), seq(Text('{"value":'), INTEGER, Text(',"next":'), choice(Text("null"), Rule(1)), Text("}"))))
JSON = Grammar(
    (
        choice(STRING, NUMBER, Text("true"), Text("false"), Text("null"), Rule(1), Rule(2)),
        seq(
            Text("{"),
            Repeat(seq(STRING, Text(":"), Rule(0), Repeat(seq(Text(","), STRING, Text(":"), Rule(0)))), 0, 1),
            Text("}"),
        ),
        array(Rule(0)),
    )
)
PERSON = Grammar(
    (
        seq(Text('{"name":'), STRING, Text(',"age":'), INTEGER, Text(',"role":'), Rule(1), Text("}")),
        choice(*(Text(f'"{role}"') for role in ("admin", "user", "userland"))),
    )
)
CALLS = Grammar(
    (
        seq(Free(("<call>",)), Repeat(seq(Text("<call>"), Rule(1), Text("</call>"), Free(("<call>",))))),
        seq(Text('{"f":'), choice(INTEGER, Rule(1)), Text("}")),
    )
)
THINKING = Grammar((seq(Free(), Token(SPECIAL), Rule(1)), LINKED.rules[1]))
ALL = {"numbers": NUMBERS, "linked": LINKED, "json": JSON, "person": PERSON, "calls": CALLS, "thinking": THINKING}


def frame(words=()):
    """Every byte, then some words; 300 and 301 are special."""
    tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in words]
    tokens += [b""] * (302 - len(tokens))
    return Frame(tokens, {SPECIAL: "<special>", END_ID: "<end>"})


WORDS = (
    '{"',
    '":',
    '","',
    "null",
    "true",
    ',"next":',
    '{"value":',
    "12",
    "007",
    "aaaa",
    "<call>",
    "</call>",
    "é",
    "[[",
)


# --- what a grammar matches, by trying everything ---------------------------------------------------------------------

ALPHABET = ("a", "b", "é", "À")  # the last: what a half character is completed to


def language(grammar, most):
    """Every match of at most so many symbols (bytes, and 256 + id of special tokens), until no rule has more."""
    found = [set() for _ in grammar.rules]
    while True:
        new = [matches(rule, found, most) for rule in grammar.rules]
        if new == found:
            return found[0]
        found = new


def matches(expression, rules, most):
    match expression:
        case Text(text):
            words = {tuple(text.encode())}
        case Chars(ranges):
            words = {tuple(c.encode()) for c in ALPHABET for low, high in ranges if low <= ord(c) <= high}
        case Token(token_id):
            words = {(256 + token_id,)}
        case Free(without, not_first):
            anywhere, first = (
                {word for part in parts for word in matches(Text(part) if isinstance(part, str) else part, rules, most)}
                for parts in (without, not_first)
            )
            words = {word for _, word in texts(most) if not contains(word, anywhere, len(word))}
            words = {word for word in words if not contains(word, first, 1)}
        case Sequence(items):
            words = {()}
            for item in items:
                words = joined(words, matches(item, rules, most), most)
        case OneOf(options):
            words = set().union(*(matches(option, rules, most) for option in options))
        case Repeat(item, least, limit):
            words = repeated(matches(item, rules, most), least, limit, most)
        case Rule(number):
            words = rules[number]
    return {word for word in words if len(word) <= most}


def contains(word, parts, n_starts):
    """True if one of the parts is in the word, at one of its first starts."""
    return any(word[at : at + len(part)] == part for part in parts for at in range(n_starts))


@cache
def texts(most):
    """Every text of at most so many bytes, and its bytes."""
    found = ("".join(chars) for n in range(most + 1) for chars in product(ALPHABET, repeat=n))
    return [(text, word) for text in found if len(word := tuple(text.encode())) <= most]


def joined(left, right, most):
    short = [[word for word in right if len(word) <= n] for n in range(most + 1)]
    return {a + b for a in left for b in short[most - len(a)]}


def repeated(item, least, limit, most):
    power = {()}
    for _ in range(least):
        power = joined(power, item, most)
    words, n = set(power), least
    while limit is None or n < limit:
        power = joined(power, item, most)
        if power <= words:
            break
        words |= power
        n += 1
    return words


LINK = Sequence((Text("a"), Repeat(Chars(((98, 98),))), Text("a")))  # a pattern that free text may avoid


def expressions(n_rules):
    ranges = st.sampled_from([((97, 97),), ((97, 98),), ((233, 233),), ((98, 233),)])
    leaves = st.one_of(
        st.builds(Text, st.text("abé", max_size=3)),
        st.builds(Chars, ranges),
        st.just(Token(SPECIAL)),
        st.builds(Rule, st.integers(0, n_rules - 1)),
        st.builds(Free, st.sampled_from([("ab",), ("a", "é"), (), (LINK,)]), st.sampled_from([(), ("ba",), (LINK,)])),
    )
    counts = st.sampled_from([(0, None), (1, None), (0, 1), (1, 3), (2, 2), (0, 0)])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: Sequence(tuple(items))),
            st.lists(inner, min_size=1, max_size=3).map(lambda items: OneOf(tuple(items))),
            st.tuples(inner, counts).map(lambda drawn: Repeat(drawn[0], *drawn[1])),
        ),
        max_leaves=6,
    )


grammars = st.integers(1, 3).flatmap(
    lambda n: st.tuples(*[expressions(n)] * n).map(lambda rules: Grammar(tuple(rules)))
)
