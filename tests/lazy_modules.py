"""Libraries that take seconds to import, imported when a test first uses them.

Every test process collects every file, but only one process needs the SDKs and one transformers: tests/scheduling.py
runs files that use the same library in the same process. Annotations that name a lazy module are strings.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

importing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext  # entered around an import


class LazyModule:
    """A module that is imported when its first attribute is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "is_hypothesis_test":  # plugins ask every object of a file
            raise AttributeError(name)
        with importing():  # transformers imports what an attribute needs when it is read
            return getattr(importlib.import_module(self._name), name)


anthropic = LazyModule("anthropic")
cloudflare = LazyModule("cloudflare")
openai = LazyModule("openai")
transformers = LazyModule("transformers")


def skip_without(name: str) -> None:
    """Skip the test file that calls this unless the library is installed. Unlike `importorskip`, import nothing."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}", allow_module_level=True)
