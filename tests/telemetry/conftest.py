"""Fixtures of the service's tests: what operators see comes from requests through a whole service."""

from tests.service.conftest import engine, grammars, open_one, say, service, text_model

__all__ = ["engine", "grammars", "open_one", "say", "service", "text_model"]
