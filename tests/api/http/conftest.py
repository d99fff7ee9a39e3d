"""Node ids of the fuzzed operations: each operation is a test of its own."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add the operation to the node id. pytest 9.2 leaves it out, and xdist runs one test of those with the same id."""
    fuzzed = [item for item in items if hasattr(item, "operation_label")]
    for item in fuzzed:
        if not item.nodeid.endswith("]"):
            item._id = item.id.with_params(item.operation_label)
    assert len({item.nodeid for item in fuzzed}) == len(fuzzed), "operations share node ids: most would not be tested"
