"""The small model that sees: its pictures, and its checkpoint as transformers and our own loaders read it."""

from pathlib import Path

import pytest
import torch

from benchmarks.seeing_model import IMAGE, QUESTIONS, SIDE, Scenes, SeeingModel, Sizes, batch, png, prompt_ids, save
from emberline.models.vision.loading import load_tower
from emberline.protocol.token_ids import unpack
from emberline.text.text_model import TextModel
from emberline.weights.checkpoint import open_checkpoint
from tests.lazy_modules import transformers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[SeeingModel, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("seeing")
    model = SeeingModel(Sizes(64, 64, 2, 2, 1)).to(torch.bfloat16).float()
    save(model, folder)
    return model, folder


@torch.inference_mode()
def test_transformers_computes_the_same_logits(model: tuple[SeeingModel, Path]) -> None:
    ours, folder = model
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pictures, token_ids, _ = batch(4, torch.Generator().manual_seed(1), held_out=False)
    pixels = (pictures.permute(0, 3, 1, 2).float() / 127.5 - 1)[:, None]
    expected = theirs(input_ids=token_ids, pixel_values=pixels).logits
    torch.testing.assert_close(ours(pictures, token_ids), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_our_loaders_read_the_checkpoint(model: tuple[SeeingModel, Path]) -> None:
    ours, folder = model
    pictures, _, _ = batch(4, torch.Generator().manual_seed(1), held_out=False)
    tower = load_tower(folder, device="cpu", dtype=torch.float32)
    assert tower is not None
    torch.testing.assert_close(tower.encode(list(pictures)), ours.rows(pictures).flatten(0, 1), atol=1e-5, rtol=1e-4)
    assert open_checkpoint(folder).config.eos_ids
    text = TextModel.load(folder)
    assert text.images is not None
    picture = text.images.plan(SIDE, SIDE)
    assert picture.resizes[-1] == (SIDE, SIDE)
    rendered = f"<|im_start|>User:{picture.text}{QUESTIONS[1]}<end_of_utterance>\nAssistant:"
    assert list(unpack(text.encode(rendered, special=True))) == prompt_ids(QUESTIONS[1])
    assert prompt_ids(QUESTIONS[1]).count(IMAGE) == picture.n_rows


def test_held_out_combinations_are_never_learned() -> None:
    drawn = [Scenes.draw(4000, torch.Generator().manual_seed(1), held_out=held_out) for held_out in (False, True)]
    learned, kept = (
        set(zip(each.names.tolist(), each.colours.tolist(), each.places.tolist(), strict=True)) for each in drawn
    )
    assert not learned & kept
    assert 80 < len(kept) < 125
    assert len(learned) > 800


def test_labels_are_the_answers() -> None:
    generator = torch.Generator().manual_seed(1)
    scenes = Scenes.draw(8, torch.Generator().manual_seed(1), held_out=True)
    pictures, token_ids, labels = batch(8, generator, held_out=True)
    for number in range(8):
        written = bytes(label for label in labels[number].tolist() if 0 <= label < 256).decode()
        assert written == " " + scenes.answer(number, number % len(QUESTIONS))
        assert bytes(token for token in token_ids[number].tolist() if token < 256).decode().endswith(written)
    assert png(pictures[0]).startswith(b"\x89PNG")
    assert pictures.float().std(dim=(1, 2)).min() > 5
