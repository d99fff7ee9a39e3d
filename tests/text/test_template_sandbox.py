from datetime import datetime
from functools import partial

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from emberline.protocol.errors import BadInput
from emberline.text.chat_template import ChatTemplate
from emberline.text.template_renderer import LocalRenderer
from emberline.text.template_sandbox import BoundedEnvironment, TemplateLimits
from emberline.weights.model_config import BadCheckpoint

GROW = "{% set ns = namespace(x=START) %}{% for i in range(TIMES) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def _grow(start, step, times=24):
    return GROW.replace("START", start).replace("STEP", step).replace("TIMES", str(times))


ENDLESS = {
    "silent nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "rounds that a test drops": "{% for i in range(99999) %}{% for j in range(99999) if false %}x{% endfor %}"
    "{% endfor %}",
    "recursive loop": "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "wide recursive loop": "{% for i in range(99999) recursive %}{% if loop.depth0 < 1 %}{{ loop(range(99999)) }}"
    "{% endif %}{% endfor %}",
    "doubling macro": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "slow comparisons": "{% set a = 'a' * 9000000 %}{% set b = 'a' * 9000000 %}"
    "{% for i in range(99999) %}{% if a == b %}{% endif %}{% endfor %}",
    "a counter set back": "{% for i in range(99999)|_counted(-99999999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
# Templates that would take much memory, by the limit that stops them: a pattern in the error.
HUGE = {
    "more than 1000000 steps": {
        "literal text": "{% for i in range(99999) %}" + "x" * 10000 + "{% endfor %}",
        "constant text": "{% for i in range(99999) %}{{ '" + "x" * 10000 + "' }}{% endfor %}",
        "text of a macro": (
            "{% macro m() %}" + "x" * 10000 + "{% endmacro %}{% for i in range(99999) %}{% set x = m() %}{% endfor %}"
        ),
        "padding": "{% for i in range(99999) %}{{ 'x'|center(9000) }}{% endfor %}",
        "doubled by ~": _grow("'a'", "ns.x ~ ns.x"),
        "doubled by a block": (
            "{% set ns = namespace(x='a') %}{% for i in range(25) %}"
            "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}"
        ),
        "long lists": _grow("[1]", "ns.x + ns.x"),
    },
    "more than 16777216 characters": {
        "doubled by +": _grow("'a'", "ns.x + ns.x"),
        "nested lists": _grow("['lol']", "[ns.x, ns.x]", 21),
        "nested tuples": _grow("['lol']", "(ns.x, ns.x)", 21),
        "nested dicts": _grow("{'a': 'lol'}", "{'a': ns.x, 'b': ns.x}", 21),
        "nested dicts by a function": _grow("{'a': 'lol'}", "dict(a=ns.x, b=ns.x)", 21),
        "nested lists by a filter": _grow("['lol']", "[1]|batch(3, ns.x)|list", 21),
        "repeated": "{{ 'a' * 10**8 }}",
        "repeated list": "{{ [0] * 30000000 }}",
        "replace": "{% set b = 'a' * 10**4 %}{{ b|replace('a', b) }}",
        "replace method": "{% set b = 'a' * 10**4 %}{{ b.replace('a', b) }}",
        "translate": "{% set b = 'a' * 10**6 %}{{ b.translate({97: b}) }}",
        "translate by a list": "{% set b = 'a' * 10**6 %}{{ b.translate([b] * 128) }}",
        "join": "{% set b = 'a' * 10**4 %}{{ b|list|join(b) }}",
        "join method": "{% set b = 'a' * 10**4 %}{{ b.join(b) }}",
        "indent": "{% set b = '\n' * 10**4 %}{{ b|indent(9999, true, true) }}",
    },
    "more than 1048576 items": {
        "list of characters": "{{ ('ab' * 4000000)|list|sort }}",
    },
    "more than 4096 bits": {
        "power": "{{ (9**999)**999 }}",
        "product": _grow("99999", "ns.x * ns.x"),
    },
    "(width|number) above 9999": {
        "center": "{{ 'a'|center(10**9) }}",
        "center method": "{{ 'a'.center(10**9) }}",
        "format": "{{ '%1000000000d' % 1 }}",
        "format with *": "{{ '%*d' % (1000000000, 1) }}",
        "format filter": "{{ '%1000000000d'|format(1) }}",
        "format method": "{{ '{:1000000000}'.format(1) }}",
        "nested format": "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "indented JSON": "{{ [1, [2]]|tojson(indent=10**9) }}",
    },
    "time in more than 1000 characters": {
        "strftime_now": "{{ strftime_now('%c' * 10**6) }}",
        "strftime_now with a width": "{{ strftime_now('%9999999999d') }}",
    },
    "Range too big": {
        "range": "{% for i in range(10**9) %}{% endfor %}",
    },
}
ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ raise_exception.__globals__['re'].x }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
    "{{ (range(3)|_counted(0))._budget.begin() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'system'}) }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}",
]


def _render(source, **limits):
    environment = BoundedEnvironment(TemplateLimits(**limits))
    template = ChatTemplate(source, renderers=partial(LocalRenderer, environment=environment))
    return template.render([{"role": "user", "content": "hi"}], {}, add_generation_prompt=True)


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_is_ended(name):
    with pytest.raises(BadInput, match=r"chat template was stopped: it (ran|did|went)"):
        _render(ENDLESS[name], seconds=0.2)


def test_work_is_limited_independently_of_time():
    with pytest.raises(BadInput, match="more than 10000 steps"):
        _render(ENDLESS["silent nested loops"], seconds=60, work=10_000)


@pytest.mark.parametrize(("reason", "name"), [(reason, name) for reason, named in HUGE.items() for name in named])
def test_a_template_that_grows_for_ever_ends(reason, name):
    """The size of what it makes ends it, never the clock: a template can take all memory in less than a second."""
    with pytest.raises(BadInput, match=rf"chat template (was stopped|cannot).*{reason}"):
        _render(HUGE[reason][name], seconds=60, work=1_000_000)


def test_the_limits_on_sizes_are_those_that_were_set():
    with pytest.raises(BadInput, match="more than 1000 characters"):
        _render("{{ 'a' * 1001 }}", chars=1000)
    assert _render("{{ 'a' * 999 }}", chars=1000) == "a" * 999
    with pytest.raises(BadInput, match="more than 10 items"):
        _render("{{ 'abcdefghijk'|list }}", items=10)
    assert _render("{{ 'abcdefghij'|list|length }}", items=10) == "10"
    with pytest.raises(BadInput, match="rendered messages are longer than 1000"):
        _render("{{ 'a' * 600 }}{{ 'a' * 600 }}", chars=1000)


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_out(source):
    with pytest.raises(BadInput, match="chat template cannot"):
        _render(source)


def test_each_rendering_has_a_budget_of_its_own():
    renderers = partial(LocalRenderer, environment=BoundedEnvironment(TemplateLimits(work=1_000)))
    template = ChatTemplate("{% for i in range(900) %}{% endfor %}done", renderers=renderers)
    for _ in range(5):
        assert template.render([{"role": "user", "content": "hi"}], {}, add_generation_prompt=True) == "done"


@pytest.mark.parametrize(
    "source", ["{% for x in %}", "{{ " + "(" * 2000, "{% for a in b %}" * 30 + "{% endfor %}" * 30]
)
def test_a_template_that_does_not_compile_is_named(source):
    with pytest.raises(BadCheckpoint, match="chat template does not compile"):
        ChatTemplate(source)


def test_a_template_too_long_is_named():
    with pytest.raises(BadCheckpoint, match="longer"):
        ChatTemplate("x" * (1 << 21))


SAME = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}{{ m }}{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{{ m['content'] }}{% else %}none{% endfor %}",
    "{% for m in messages %}{{ loop.previtem.role if loop.previtem is defined }}"
    "{{ loop.nextitem is defined }}{% endfor %}",
    "{% for a, b in [(1, 2), (3, 4)] %}{{ a ~ b }}{{ loop.cycle('x', 'y') }}{% endfor %}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% else %}{% continue %}{% endif %}x{% endfor %}",
    "{% for k, v in {'a': 1, 'b': [1, {'c': none}]}.items() %}{{ k }}={{ v|tojson }}{% endfor %}",
    "{% set ns = namespace(n=0, xs=[]) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% set ns.xs = ns.xs + [m] %}"
    "{% endfor %}{{ ns.n }}{{ ns.xs|length }}",
    "{%- macro turn(m, sep='\n') -%}{{ m.role ~ sep ~ m.content|trim }}{%- endmacro -%}"
    "{{ turn(messages[0]) }}{{ turn(messages[1], sep=': ') }}",
    "{% set text %}{% for m in messages %}{{ m.content }}|{% endfor %}{% endset %}"
    "{{ text.strip().split('|')|join(' ') }}",
    "{{ messages[::-1]|map(attribute='role')|list }}{{ messages[1:]|selectattr('role', 'equalto', 'user')|first }}",
    "{{ messages|tojson }}{{ messages[0]|tojson(indent=2) }}{{ '<&é>'|tojson }}{{ [1.5, true, none]|tojson }}",
    "{{ 7 // 2 }}{{ 2 ** 8 }}{{ 'a' * 3 }}{{ '%s-%05d' % ('x', 42) }}{{ '{:>5}|{}'.format('a', 123456) }}{{ 10 % 3 }}",
    "{{ missing }}{{ missing is defined }}{{ none }}{{ (1, 2) }}{{ [] }}{{ {} }}{{ 'a' in ['a', 'b'] }}",
    "  {% if true %}\n    x\n  {% endif %}\n  {{- ' y ' -}}  \n",
    "{{ 'abcabc'.replace('a', 'xyz') }}{{ 'a,b'.split(',') }}{{ 'Ab'|upper }}{{ 3|string ~ 4 }}{{ 'x'|default('y') }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
    "{% call(x) run() %}<{{ x }}>{% endcall %}",
]


@pytest.mark.parametrize("source", SAME)
def test_counting_changes_nothing_else(source):
    """Against Jinja's sandbox as transformers sets it up."""
    if source.startswith("{% call"):
        source = "{% macro run() %}{{ caller('in') }}{% endmacro %}" + source
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = BoundedEnvironment().filters["tojson"]
    turns = [{"role": "system", "content": " a "}, {"role": "user", "content": "b\n"}, {"role": "user", "content": "é"}]
    assert ChatTemplate(source).render(turns, {}, add_generation_prompt=True) == plain.from_string(source).render(
        messages=turns
    )


def test_generation_tags_are_their_body():
    assert _render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


def test_the_date_is_there():
    before, rendered = datetime.now(), _render("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}")
    assert before.replace(microsecond=0) <= datetime.fromisoformat(rendered) <= datetime.now()
