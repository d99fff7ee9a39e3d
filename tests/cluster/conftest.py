"""Fixtures of the service's tests: workers join, leave and change their roles under a whole service."""

from tests.service.conftest import engine, open_one, say, service, text_model

__all__ = ["engine", "open_one", "say", "service", "text_model"]
