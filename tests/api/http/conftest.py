"""Each fuzzed operation is a test of its own."""

import pytest
from schemathesis.pytest.plugin import SchemathesisFunction


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest 9.2 leaves the operation out of the node ids, and xdist runs one test of those with the same id."""
    for item in items:
        if isinstance(item, SchemathesisFunction) and not item.nodeid.endswith("]"):
            item._id = item.id.with_params(item.operation_label)
