"""Chat templates of models that are not of the catalog, rendered in confined processes."""

import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from emberline.protocol.errors import BadInput
from emberline.protocol.request import Message
from emberline.supervisor.sandbox.confinement import Confinement
from emberline.supervisor.sandbox.launcher import ConfinedProcess, Launcher
from emberline.text.chat_template import ChatTemplate
from emberline.text.template_processes import ConfinedTemplates
from emberline.weights.model_config import BadCheckpoint

MEMORY_BYTES = 128 << 20
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls|tojson }}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PICKY = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
# One template that misbehaves as its message says. None of it is bounded by the sandbox inside the process alone.
HOSTILE = """{% set c = messages[0].content %}
{%- if c == 'translate' %}{% set b = 'a' * 10**6 %}{{ b.translate({97: b}) }}
{%- elif c == 'strftime' %}{{ strftime_now('%c' * 10**7) }}
{%- elif c == 'wide strftime' %}{{ strftime_now('%4000000000d') }}
{%- elif c == 'loops' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}
{%- elif c == 'recursion' %}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{%- elif c == 'output' %}{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}
{%- elif c == 'memory' %}{% set ns = namespace(x=[]) %}
{%- for i in range(99) %}{% set ns.x = ns.x + [('x' ~ i) * 7000000] %}{% endfor %}
{%- elif c == 'slow' %}{% set a = ('ab' * 8000000) %}{% for i in range(9999) %}{% set q = a.count('aab') %}{% endfor %}
{%- else %}well{% endif %}"""


class Counting:
    """A launcher that knows the processes it has started."""

    def __init__(self) -> None:
        self._launcher = Launcher(Confinement(memory_bytes=MEMORY_BYTES))
        self.processes: list[ConfinedProcess] = []

    def __call__(self, module: str) -> ConfinedProcess:
        self.processes.append(self._launcher.start(module))
        return self.processes[-1]

    def n_alive(self) -> int:
        return sum(os.path.exists(f"/proc/{process.pid}") for process in self.processes)


def said(template: ChatTemplate, *contents: str) -> str:
    turns = template.turns([Message("user", content) for content in contents])
    return template.render(turns, {}, add_generation_prompt=True)


def test_a_template_renders_as_it_would_here_and_its_process_ends_with_it() -> None:
    start = Counting()
    there, here = ChatTemplate(PICKY, {"eos_token": "</s>"}, ConfinedTemplates(start)), ChatTemplate(PICKY)
    assert there.variables == here.variables
    assert (there.blocks, here.blocks) == (True, False)
    odd = "\ud800 \x00 é 漢字 " + "long " * 100_000
    call = {"function": {"name": "f", "arguments": {"big": 1 << 90, "x": [1.5, None, True]}}}
    for turns in (
        [{"role": "user", "content": odd}],
        [{"role": "system", "content": "folded"}, {"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}],
    ):
        for prompt in (True, False):
            expected = here.render(turns, {"x": 1}, add_generation_prompt=prompt)
            assert there.render(turns, {"x": 1}, add_generation_prompt=prompt) == expected
    with pytest.raises(BadInput, match="refuses these messages: no system"):
        there.render([{"role": "system", "content": "alone"}], {}, add_generation_prompt=True)
    assert len(start.processes) == 1
    del there
    gc.collect()
    assert start.n_alive() == 0


def test_a_hostile_template_costs_its_own_requests_alone() -> None:
    start = Counting()
    template = ChatTemplate(HOSTILE, None, ConfinedTemplates(start, cpu_s=0.3))
    for name in ("translate", "strftime", "wide strftime", "recursion", "output", "memory", "slow"):
        with pytest.raises(BadInput, match=r"the model's chat template (was stopped|cannot)"):
            said(template, name)
        assert said(template, "hello") == "well", f"after {name}"
    assert start.n_alive() <= 2


def test_an_endless_template_is_ended_whoever_waits_gets_a_turn() -> None:
    start = Counting()
    template = ChatTemplate(HOSTILE, None, ConfinedTemplates(start, cpu_s=0.3))
    with ThreadPoolExecutor(4) as threads:
        endless = [threads.submit(said, template, "loops") for _ in range(2)]
        fine = [threads.submit(said, template, "hello") for _ in range(2)]
        for done in endless:
            with pytest.raises(BadInput, match=r"was stopped: it ran for more than 0.3 seconds"):
                done.result()
        assert [done.result() for done in fine] == ["well", "well"]


def test_a_process_that_dies_between_requests_is_replaced() -> None:
    start = Counting()
    template = ChatTemplate(HOSTILE, None, ConfinedTemplates(start))
    os.kill(start.processes[0].pid, signal.SIGKILL)
    while start.processes[0].is_alive:
        time.sleep(0.001)
    assert said(template, "hello") == "well"
    assert len(start.processes) == 2


@pytest.mark.parametrize(
    ("source", "problem"), [("{% for x in %}", "does not compile"), ("x" * (1 << 21), "is longer than")]
)
def test_a_template_that_does_not_compile_is_named_and_leaves_no_process(source: str, problem: str) -> None:
    start = Counting()
    with pytest.raises(BadCheckpoint, match=f"the chat template {problem}"):
        ChatTemplate(source, None, ConfinedTemplates(start))
    assert start.n_alive() == 0
