"""Tiles, pixels, rows and text of images are those of each model's own processor in transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from emberline.protocol.errors import BadInput
from emberline.protocol.images import ImagePlan, ImageProcessor, expand, image_digest, locate
from emberline.protocol.token_ids import pack
from emberline.text.image_pixels import image_pixels

SIZES = [(64, 64), (100, 37), (37, 100), (129, 256), (64, 65), (500, 20), (1, 1), (3, 700)]
HALF = (0.5, 0.5, 0.5)


def processor(family: Any, **settings: Any) -> ImageProcessor:
    common = dict(placeholder="<i>", image_token="<i>", image_token_id=7, mean=HALF, std=HALF)
    return ImageProcessor(family=family, **{**common, **settings})


IDEFICS = processor("idefics3", patch=8, merge=2, resample=1, tile=64, longest_edge=256)
PIXTRAL = processor("pixtral", patch=8, merge=2, resample=3, longest_edge=128)
SIGLIP = processor("siglip", patch=8, merge=4, resample=2, tile=96)
QWEN = processor("qwen3_vl", patch=8, merge=2, resample=3, min_pixels=4096, max_pixels=40_000)
KIMI = processor("kimi_k25", patch=8, merge=2, resample=3, max_patches=300, max_side=24)


def picture(size: tuple[int, int]) -> Image.Image:
    noise = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(noise)


def tiles(image: Image.Image, plan: ImagePlan) -> list[np.ndarray[Any, Any]]:
    pixels, found = image_pixels(image, plan), []
    assert len(pixels) == plan.n_bytes
    for width, height in plan.tile_sizes:
        n = 3 * width * height
        found.append(np.frombuffer(pixels[:n], np.uint8).reshape(height, width, 3))
        pixels = pixels[n:]
    return found


def expected_tiles(theirs: Any, image: Image.Image) -> Any:
    """What the processor of transformers makes of an image, before it normalizes."""
    return theirs(image, do_rescale=False, do_normalize=False, return_tensors="np")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("splits", [True, False])
def test_idefics3_tiles(size: tuple[int, int], splits: bool) -> None:
    sizes = dict(size={"longest_edge": 256}, max_image_size={"longest_edge": 64})
    theirs = Idefics3ImageProcessorPil(do_image_splitting=splits, return_row_col_info=True, **sizes)
    expected = expected_tiles(theirs, picture(size))
    plan = IDEFICS.plan(*size, detail="auto" if splits else "low")
    ours = tiles(picture(size), plan)
    assert len(ours) == len(expected["pixel_values"][0])
    for tile, other in zip(ours, expected["pixel_values"][0]):
        np.testing.assert_array_equal(tile, other.transpose(1, 2, 0))
    rows, columns = expected["rows"][0][0], expected["cols"][0][0]
    text = get_image_prompt_string(rows, columns, 16, "<fake_token_around_image>", "<i>", "<global-img>")
    assert plan.text == text
    assert plan.n_rows == text.count("<i>")


@pytest.mark.parametrize("size", [size for size in SIZES if size != (3, 700)])  # theirs fails there
def test_pixtral_keeps_the_aspect_ratio(size: tuple[int, int]) -> None:
    theirs = PixtralImageProcessorPil(size={"longest_edge": 128}, patch_size=16)
    expected = expected_tiles(theirs, picture(size))
    plan = PIXTRAL.plan(*size)
    (tile,) = tiles(picture(size), plan)
    np.testing.assert_array_equal(tile, expected["pixel_values"][0].transpose(1, 2, 0))
    height, width = (side // 16 for side in tile.shape[:2])
    lines = plan.text.removesuffix("[IMG_END]").split("[IMG_BREAK]")
    assert [len(line) for line in lines] == [3 * width] * height
    assert plan.n_rows == height * width


@pytest.mark.parametrize("size", SIZES)
def test_siglip_stretches(size: tuple[int, int]) -> None:
    theirs = Gemma3ImageProcessorPil(size={"height": 96, "width": 96})
    expected = expected_tiles(theirs, picture(size))
    plan = SIGLIP.plan(*size)
    (tile,) = tiles(picture(size), plan)
    np.testing.assert_array_equal(tile, expected["pixel_values"][0].transpose(1, 2, 0))
    assert plan.text == "\n\n<start_of_image>" + 9 * "<i>" + "<end_of_image>\n\n"


@pytest.mark.parametrize("size", [size for size in SIZES if max(size) < 200])
def test_qwen_bounds_the_pixels(size: tuple[int, int]) -> None:
    bounds = {"shortest_edge": 4096, "longest_edge": 40_000}
    theirs = Qwen2VLImageProcessorPil(size=bounds, patch_size=8, merge_size=2, temporal_patch_size=1)
    expected = expected_tiles(theirs, picture(size))
    plan = QWEN.plan(*size)
    (tile,) = tiles(picture(size), plan)
    _, rows, columns = expected["image_grid_thw"][0]
    assert tile.shape[:2] == (8 * rows, 8 * columns)
    patches = tile.reshape(rows // 2, 2, 8, columns // 2, 2, 8, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    np.testing.assert_array_equal(patches.reshape(rows * columns, -1), expected["pixel_values"])
    assert plan.n_rows == len(plan.text) // 3 == rows * columns // 4


def test_qwen_takes_no_ribbons() -> None:
    with pytest.raises(BadInput, match="700 x 3"):
        QWEN.plan(700, 3)
    assert QWEN.plan(600, 3).n_rows


def test_kimi_reduces_and_pads() -> None:
    small = KIMI.plan(40, 20)  # never enlarged; padded to squares of 16
    assert small.tile_sizes == ((48, 32),)
    (tile,) = tiles(picture((40, 20)), small)
    np.testing.assert_array_equal(tile[:20, :40], np.asarray(picture((40, 20))))
    assert not tile[20:].any()
    assert not tile[:, 40:].any()
    wide = KIMI.plan(1920, 40)  # by its longer side: 24 patches of 8
    assert wide.tile_sizes == ((192, 16),)
    large = KIMI.plan(184, 184)  # by the number of its patches: 529 of at most 300
    assert large.tile_sizes == ((144, 144),)
    assert large.n_rows == 81 == large.text.count("<i>")


def test_published_sizes() -> None:
    smolvlm = processor("idefics3", patch=16, merge=4, resample=1, tile=512, longest_edge=2048)
    assert smolvlm.plan(1920, 1080).n_rows == 832
    kimi = processor("kimi_k25", patch=14, merge=2, resample=3, max_patches=16_384, max_side=512)
    assert kimi.plan(4096, 4096).n_rows == 4225
    assert kimi.plan(4096, 4096, "low").n_rows == 18 * 18


def test_placeholders_become_rows_and_are_found() -> None:
    plans = [PIXTRAL.plan(32, 32), PIXTRAL.plan(16, 48)]
    text = expand("a<i>b<i>c", PIXTRAL, plans)
    assert text == f"a{plans[0].text}b{plans[1].text}c"
    rest = text.replace("[IMG_BREAK]", "B").replace("[IMG_END]", "E").replace("<i>", "I")
    ids = pack(7 if letter == "I" else ord(letter) for letter in rest)
    assert rest == "aIIBIIEbIBIBIEc"
    assert locate(ids, PIXTRAL, plans) == [(1, 6), (8, 13)]
    with pytest.raises(BadInput, match="3 of the conversation's 2 images"):
        expand("<i><i><i>", PIXTRAL, plans)
    with pytest.raises(BadInput, match="1 image tokens, and its 2 images make 7"):
        locate(pack([7, 8]), PIXTRAL, plans)


def test_digests_name_file_processing_and_account() -> None:
    low, high = IDEFICS.plan(1000, 1000, "low"), IDEFICS.plan(1000, 1000)
    cases = [(b"file", low, b"a"), (b"file", high, b"a"), (b"file", low, b"b"), (b"other", low, b"a")]
    assert len({image_digest(*case) for case in cases}) == 4
    assert image_digest(*cases[0]) == image_digest(*cases[0])


def test_settings_are_read_from_a_folder(tmp_path: Path) -> None:
    from emberline.weights.image_settings import read_image_processor

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_image_processor(tmp_path) is None
    (tmp_path / "config.json").write_text(
        '{"model_type": "smolvlm", "image_token_id": 49190, "scale_factor": 4,'
        ' "vision_config": {"patch_size": 16, "image_size": 512}}'
    )
    (tmp_path / "preprocessor_config.json").write_text(
        '{"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "resample": 1,'
        ' "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "do_image_splitting": true}'
    )
    read = read_image_processor(tmp_path)
    assert read is not None
    assert (read.tile, read.longest_edge, read.cell, read.resample, read.image_token_id) == (512, 2048, 64, 1, 49190)
