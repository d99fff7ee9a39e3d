"""Kernels that were not prepared are told in the log."""

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from emberline.kernels.gpu import launch


def test_a_late_kernel_is_named_with_what_it_was_specialized_for(caplog):
    kernel = SimpleNamespace(arg_names=["x", "rows", "BLOCK"])
    attributes = {(0,): [["tt.divisibility", 16]]}
    source = SimpleNamespace(
        fn=kernel, name="_kernel", attrs=attributes, constants={(2,): 128}
    )  # as ASTSource has them
    with caplog.at_level(logging.WARNING):
        launch._warn_of(source)
    assert "_kernel was not prepared" in caplog.text
    assert (caplog.records[0].aligned, caplog.records[0].constants) == ("x", {"BLOCK": "128"})
