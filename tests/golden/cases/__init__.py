"""The cases of the golden exchanges, one module for each API."""

from tests.golden.cases import admin, anthropic, gateway, jobs, ollama, openai_chat, responses, surface, workers_ai
from tests.golden.exchange import Case


def all_cases() -> list[Case]:
    """Every case; a case is the name of its golden file and the requests that it sends."""
    modules = (openai_chat, responses, anthropic, workers_ai, ollama, gateway, jobs, admin, surface)
    return [case for module in modules for case in module.cases()]
