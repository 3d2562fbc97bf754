"""Pictures are cut into the tiles that the reference library's processor makes of them, whatever their size, and a
prompt has what it writes for these."""

import io
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.protocol.frames import FRAME_BYTES_MAX
from gateway.catalogue.model_config import read_json
from gateway.errors import ApiError
from gateway.images import placing
from gateway.images.decoder import ImageDecoder
from gateway.images.placing import decode_images, lay_out, pack_prompt
from gateway.images.source import ImageSource
from gateway.images.tiling import Tiling
from gateway.images.vision import Vision, read_vision
from tests.support.seeing_models import TOKENS
from tests.support.served_gateway import looped
from tests.support.tiling_models import VISION, picture_text, reference_processing, reference_tiles

TEXTS = ("<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|patch|>")
ADDED = {text: 200 + index for index, text in enumerate(TEXTS)}
CONFIG = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "image_token_index": ADDED["<|patch|>"],
    "vision_config": VISION,
}
SIDE = VISION["image_size"]
SIZES = [(336, 336), (1, 1), (1, 200), (700, 500), (500, 700), (3000, 200), (2000, 2000), (335, 337), (672, 336)]


def tiling(side: int = 336, tiles_max: int = 16, enlarges: bool = False) -> Tiling:
    return Tiling(side, tiles_max, enlarges, *range(5))


def vision(**changes: Any) -> Vision:
    read = read_vision(Path(), {**CONFIG, **changes}, ADDED, lambda path, default: default)
    assert read is not None
    return read


def encoded(pixels: np.ndarray) -> ImageSource:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return ImageSource(buffer.getvalue(), None, f"image of {pixels.shape[1]}")


def noise(size: tuple[int, int], seed: int = 1) -> np.ndarray:
    """A picture with edges and gradients, [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 4, 3), np.uint8)
    return np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC))


@pytest.mark.parametrize("enlarges", [False, True])
@pytest.mark.parametrize("tiles_max", [1, 5, 16])
def test_grids_are_those_of_the_reference_library(tiles_max: int, enlarges: bool) -> None:
    import torch

    library = reference_processing()
    library.find_supported_resolutions.cache_clear()
    square = library.SizeDict(height=336, width=336)
    canvases = torch.tensor(library.find_supported_resolutions(tiles_max, square))
    random = np.random.default_rng(tiles_max)
    sizes = [*SIZES, *np.exp(random.uniform(0, 9, (400, 2))).astype(int).tolist()]
    sizes += (336 * random.integers(1, 20, (100, 2))).tolist()
    for width, height in sizes:
        layout = tiling(tiles_max=tiles_max, enlarges=enlarges).layout(width, height)
        canvas = library.get_best_fit((height, width), canvases, enlarges)
        assert [336 * layout.rows, 336 * layout.columns] == canvas.tolist(), (width, height)
        room = canvas if enlarges else (min(max(height, 336), canvas[0]), min(max(width, 336), canvas[1]))
        scaled = library.get_max_res_without_distortion((height, width), room)
        assert [layout.height, layout.width] == [max(int(each), 1) for each in scaled], (width, height)
        assert layout.size == (width, height)


@looped
@pytest.mark.parametrize("enlarges", [False, True])
async def test_tiles_are_those_of_the_reference_library(enlarges: bool) -> None:
    """Pillow and torch scale 8 bits a number by the same weights, in integers of other widths."""
    sizes = [(50, 40), (84, 84), (84, 168), (300, 100), (90, 400), (400, 390), (1, 60), (168, 170)]
    pictures = [noise(size, seed) for seed, size in enumerate(sizes)]
    sources, cutting = [encoded(picture) for picture in pictures], vision()._replace(tiling=tiling(SIDE, 6, enlarges))
    layouts = await lay_out(ImageDecoder(), sources, cutting)
    decoded = iter(await ImageDecoder().decode(sources, layouts, SIDE, cutting.resample))
    for picture, layout in zip(pictures, layouts, strict=True):
        pixels = b"".join(tile.pixels for tile in islice(decoded, layout.tiles))
        tiles = np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE, 3)
        wanted, grid = reference_tiles(picture, SIDE, 6, enlarges)
        assert (grid, tiles.shape) == ([layout.rows, layout.columns], wanted.shape)
        assert np.abs(tiles.astype(int) - wanted).max() <= 1
        assert (tiles == wanted).mean() > 0.9


@pytest.mark.parametrize("size", [(84, 84), (400, 390), (300, 100), (90, 400)])
def test_a_prompt_has_what_the_reference_library_writes(size: tuple[int, int]) -> None:
    seeing = vision()
    assert seeing.tiling is not None
    layout = seeing.tiling.layout(*size)
    spelled = {id: text for text, id in ADDED.items()}
    assert "".join(spelled[id] for id in seeing.ids(layout)) == picture_text(layout.rows, layout.columns)
    assert seeing.ids(layout).count(seeing.token) == TOKENS * layout.tiles


@looped
async def test_each_tile_is_an_image_of_the_prompt_with_its_own_digest() -> None:
    seeing, decoder = vision(), ImageDecoder()
    sources = [encoded(noise((300, 100))), encoded(noise((40, 40)))]
    layouts = await lay_out(decoder, sources, seeing)
    ids = [1, *seeing.ids(layouts[0]), 2, *seeing.ids(layouts[1]), 3]
    images = await decode_images(decoder, sources, layouts, seeing, ids)
    assert [layout.tiles for layout in layouts] == [9, 1]
    assert len(images) == 10
    packed = np.frombuffer(pack_prompt(ids, images, seeing), np.uint32)
    for image in images:
        assert ids[image.first - 1] != seeing.token
        assert (packed[image.first : image.first + TOKENS] >= 1 << 31).all()
        words = np.frombuffer(image.digest, np.uint32) | 1 << 31
        assert np.array_equal(packed[image.first : image.first + 8], words)
    assert (packed >= 1 << 31).sum() == ids.count(seeing.token)
    assert len({image.digest for image in images}) == 10


@looped
async def test_tiles_of_a_request_are_counted_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "TILE_BYTES_MAX", 20 * 3 * SIDE**2)
    large, small = encoded(noise((300, 100))), encoded(noise((50, 40)))
    layouts = await lay_out(ImageDecoder(), [large, small, large, small], vision())
    assert [layout.tiles for layout in layouts] == [9, 1, 9, 1]
    with pytest.raises(ApiError, match="has 9 tiles, and with those before it 28; at most 20 are taken") as refused:
        await lay_out(ImageDecoder(), [small, large, large, large], vision())
    assert refused.value.param == large.field


def test_tiles_of_a_request_fit_a_frame_with_its_tokens() -> None:
    assert placing.TILE_BYTES_MAX + (10 << 20) < FRAME_BYTES_MAX


def written(folder: Path, **processor: Any) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def test_the_processor_s_file_says_how_pictures_are_cut(tmp_path: Path) -> None:
    def read(added: dict[str, int] = ADDED, **processor: Any) -> Vision | None:
        return read_vision(written(tmp_path, **processor), CONFIG, added, read_json)

    plain = read()
    assert plain is not None
    assert plain == (
        SIDE,
        2,
        TOKENS,
        205,
        "<|image|>",
        "<|image|>",
        204,
        Tiling(SIDE, 16, False, 200, 202, 203, 204, 201),
    )
    changed = read(max_patches=4, resize_to_max_canvas=True, resample=3)
    assert changed is not None
    assert changed.tiling is not None
    assert (changed.tiling.tiles_max, changed.tiling.enlarges, changed.resample) == (4, True, 3)
    assert read(size={"height": SIDE, "width": SIDE}) == plain
    assert read(image_processor={"max_patches": 4, "resize_to_max_canvas": True, "resample": 3}) == changed
    assert read(size={"height": 336, "width": 336}) is None, "pictures of another size than the encoder's"
    for text in TEXTS:
        assert read({each: id for each, id in ADDED.items() if each != text}) is None


def test_models_without_an_encoder_take_no_images() -> None:
    read: Callable[[Path, Any], Any] = lambda path, default: default  # noqa: E731
    assert read_vision(Path(), {**CONFIG, "vision_config": None}, ADDED, read) is None
    assert read_vision(Path(), {**CONFIG, "architectures": ["Llama4ForCausalLM"]}, ADDED, read) is None
