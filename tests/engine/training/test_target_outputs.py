"""The target's states over whole sequences: attention of all at once against that of each alone."""

import pytest
import torch

from emberline.engine.training import target_outputs
from emberline.engine.training.target_outputs import SequencesBackend, plain_model, run_target
from emberline.kernels.reference import TorchBackend
from emberline.models.decoder import Decoder
from emberline.models.registry import ARCHITECTURES
from emberline.protocol.token_ids import pack
from emberline.weights.model_config import ModelConfig
from tests.engine.speculation.test_real_models import CONFIGS, SIZES
from tests.models.random_checkpoint import RandomCheckpoint

LENGTH, TAPS = 40, (0, 1, 2)
SEQUENCES = [(pack(range(3, 3 + n)), pack([(7 * n + i) % 97 for i in range(m)])) for n, m in ((4, 9), (30, 30), (1, 0))]
MODELS = CONFIGS | {
    "chunks": ModelConfig(architecture="llama", chunks=(16, None, 16), **SIZES),
    "heads alike": ModelConfig(architecture="llama", **SIZES | {"n_kv_heads": 4}),
}


def outputs(config, backend):
    model = Decoder(RandomCheckpoint(config), backend, ARCHITECTURES[config.architecture])
    return run_target(model, TAPS, SEQUENCES, LENGTH)


@pytest.mark.parametrize("name", MODELS)
def test_states_are_those_of_each_sequence_alone(name, monkeypatch):
    monkeypatch.setattr(target_outputs, "SEQUENCES_AT_ONCE", 2)
    together, alone = (outputs(MODELS[name], backend()) for backend in (SequencesBackend, TorchBackend))
    assert together.in_reply.sum().item() == 9 + LENGTH - 30
    for field in ("token_ids", "in_reply", "best"):
        assert torch.equal(getattr(together, field), getattr(alone, field))
    for field in ("taps", "hidden"):
        torch.testing.assert_close(getattr(together, field), getattr(alone, field), rtol=1e-4, atol=1e-4)


def test_the_target_is_computed_so(monkeypatch):
    config = CONFIGS["full"]
    model = plain_model(RandomCheckpoint(config), "cpu")
    monkeypatch.setattr(TorchBackend, "attend_to_cache", None)  # of each row alone
    assert len(run_target(model, TAPS, SEQUENCES, LENGTH)) == 3


def test_sinks_are_left_to_the_reference(monkeypatch):
    config = CONFIGS["full"]
    model = plain_model(RandomCheckpoint(config), "cpu")
    plain = run_target(model, TAPS, SEQUENCES, LENGTH).hidden
    for layer in model.layers:
        object.__setattr__(layer.attention, "sinks", torch.full((config.n_heads,), -torch.inf))  # of no weight
    torch.testing.assert_close(run_target(model, TAPS, SEQUENCES, LENGTH).hidden, plain, rtol=1e-4, atol=1e-4)
    for layer in model.layers:
        object.__setattr__(layer.attention, "sinks", torch.ones(config.n_heads))
    assert not torch.allclose(run_target(model, TAPS, SEQUENCES, LENGTH).hidden, plain, rtol=1e-2)
