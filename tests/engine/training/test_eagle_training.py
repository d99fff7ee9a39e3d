"""Training an EAGLE-3 head: the unrolled chain is what drafting computes, and training learns."""

from pathlib import Path

import pytest
import torch

from emberline.engine.training import eagle_training
from emberline.engine.training.eagle_training import (
    TargetOutputs,
    TrainingSettings,
    chain_attention,
    draft_vocabulary,
    set_vocabulary,
    train,
    unrolled,
)
from emberline.models.eagle3 import Eagle3Config, Eagle3Head
from emberline.models.eagle3_files import load_head, save_head
from emberline.weights.model_config import BadCheckpoint

VOCAB, HIDDEN, DRAFT = 64, 32, 24


def config(**changed: object) -> Eagle3Config:
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 8,
        "mlp_size": 48,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        "taps": (1, 2, 3),
    }
    return Eagle3Config(**(fields | changed))  # type: ignore[arg-type]


def head_with_vocabulary(seed: int = 0) -> Eagle3Head:
    torch.manual_seed(seed)
    head = Eagle3Head(config())
    set_vocabulary(head, torch.arange(DRAFT) * 2)
    return head


def outputs(n: int, length: int, seed: int = 0) -> TargetOutputs:
    """A target that counts in twos: its hidden state is the embedding of the token that follows."""
    torch.manual_seed(seed)
    first = torch.randint(DRAFT, (n, 1)) * 2
    ids = (first + 2 * torch.arange(length)) % (2 * DRAFT)
    following = (ids + 2) % (2 * DRAFT)
    embedding = torch.eye(VOCAB)[:, :HIDDEN] if VOCAB <= HIDDEN else torch.randn(VOCAB, HIDDEN)
    torch.manual_seed(1)
    embedding = torch.randn(VOCAB, HIDDEN)
    hidden = 4 * embedding[following]
    taps = torch.cat([embedding[ids], hidden, hidden], dim=-1)
    return TargetOutputs(ids, torch.ones_like(ids, dtype=torch.bool), taps, hidden, following)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    embedding = torch.randn(VOCAB, HIDDEN)
    return embedding, embedding.clone()


def test_the_unrolled_chain_is_what_drafting_computes() -> None:
    """Row i at step s equals the s-th token drafted one by one from root i, over a cache of roots and own drafts."""
    head, data = head_with_vocabulary(), outputs(1, 9, seed=3)
    embedding, _ = matrices()
    depth, length = 3, 9
    hidden = head.combine(data.taps)
    positions = torch.arange(1, length + 1)
    keys, values, unrolled_hidden = [], [], []
    rolled = hidden
    ids = data.token_ids
    for step in range(depth):
        tokens = torch.cat([ids[:, 1 + step :], ids[:, -1:].expand(-1, 1 + step)], dim=1)
        q, k, v = head.layer.attention_inputs(embedding[tokens], rolled, positions + step)
        keys.append(k)
        values.append(v)
        rolled = head.layer.finish(chain_attention(q, keys, values), rolled)
        unrolled_hidden.append(rolled)
    for root in range(length - depth):
        roots = slice(0, root + 1)
        q, k, v = head.layer.attention_inputs(embedding[ids[:, 1 : root + 2]], hidden[:, roots], positions[roots])
        state = head.layer.finish(chain_attention(q, [k], [v]), hidden[:, roots])[:, -1:]
        for step in range(depth):
            if step:
                token = embedding[ids[:, root + 1 + step : root + 2 + step]]
                q, k_new, v_new = head.layer.attention_inputs(token, state, positions[root : root + 1] + step)
                k, v = torch.cat([k, k_new], dim=1), torch.cat([v, v_new], dim=1)
                spread = [t.transpose(1, 2).repeat_interleave(2, dim=1) for t in (k, v)]
                out = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *spread)
                state = head.layer.finish(out.transpose(1, 2), state)
            torch.testing.assert_close(state[0, 0], unrolled_hidden[step][0, root], rtol=1e-4, atol=1e-5)


def test_training_learns_to_draft() -> None:
    head = head_with_vocabulary()
    embedding, lm_head = matrices()
    data, held_out = outputs(64, 24), outputs(8, 24, seed=9)
    settings = TrainingSettings(steps=60, batch=16, depth=3, warmup=10, report_every=30, learning_rate=3e-3)
    curve = train(head, embedding, lm_head, data, held_out, settings, report=lambda line: None)
    assert curve.loss[-1] < curve.loss[0]
    assert curve.accepted[-1] > 3.5  # of 1 + 3


def test_tokens_outside_the_draft_vocabulary_teach_nothing() -> None:
    head, data = head_with_vocabulary(), outputs(2, 8)
    embedding, lm_head = matrices()
    data.best += 1  # odd ids are not drafted
    loss, right = unrolled(head, embedding, lm_head[torch.arange(DRAFT) * 2], data, 2, 0.8)
    assert loss.item() == 0
    assert not right.any()


def test_the_draft_vocabulary_is_the_most_frequent_ids() -> None:
    replies = [torch.tensor([5, 5, 5, 7]), torch.tensor([7, 9, 9, 9, 1])]
    assert draft_vocabulary(replies, 16, 3).tolist() == [5, 7, 9]


def test_a_head_is_read_as_it_was_written(tmp_path: Path) -> None:
    head = head_with_vocabulary()
    save_head(head, tmp_path)
    read = load_head(tmp_path, n_target_layers=6)
    assert read.config == head.config
    for name, tensor in head.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], tensor.to(torch.bfloat16).to(tensor.dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 16}, "is \\[32"),
        ({"draft_vocab_size": 8}, "is \\[24"),
        ({"vocab_size": 8}, "outside the vocabulary"),
    ],
)
def test_a_head_of_another_shape_is_refused(tmp_path: Path, change: dict[str, int], message: str) -> None:
    save_head(head_with_vocabulary(), tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    for name, value in change.items():
        lines = [f'  "{name}": {value},' if f'"{name}"' in line else line for line in text.splitlines()]
        text = "\n".join(lines)
    path.write_text(text)
    with pytest.raises(BadCheckpoint, match=message):
        load_head(tmp_path, n_target_layers=6)


def test_a_head_with_weights_that_are_no_numbers_is_refused(tmp_path: Path) -> None:
    head = head_with_vocabulary()
    with torch.no_grad():
        head.fc.weight[0, 0] = torch.nan
    save_head(head, tmp_path)
    with pytest.raises(BadCheckpoint, match="no numbers"):
        load_head(tmp_path, n_target_layers=6)


def test_a_short_training_reaches_its_learning_rate() -> None:
    settings = TrainingSettings(steps=10)
    assert eagle_training._rate(9, settings) == 1.0
    assert eagle_training._rate(0, settings) == 0.1
