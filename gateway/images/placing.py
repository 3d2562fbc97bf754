"""A prompt's images as a replica takes them: decoded, and where they are among its tokens."""

from array import array
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

from engine.protocol.types import ImageInput
from gateway.errors import bad_input
from gateway.images.decoder import ImageDecoder
from gateway.images.source import ImageSource
from gateway.images.tiling import PictureLayout
from gateway.images.vision import Vision

TILE_BYTES_MAX: Final = 48 << 20  # of a request: its frame to a replica has no more than 64 MiB
_ABOVE: Final = 1 << 31  # tokens of images are no less, and carry their digests


def require_vision(vision: Vision | None, images: Sequence[ImageSource], model: str) -> Vision | None:
    """How the model of this name takes a prompt's images, where it has any. Raises ApiError where the model takes
    none."""
    if images and vision is None:
        field = images[0].field
        raise bad_input(f"'{field}': {model} takes no images; send text, or ask a model that sees", field)
    return vision if images else None


async def lay_out(decoder: ImageDecoder, images: Sequence[ImageSource], vision: Vision) -> list[PictureLayout]:
    """How each image becomes tiles. Raises ApiError for those that are not taken, and for too many tiles."""
    if vision.tiling is None:
        return [vision.whole] * len(images)
    layouts = [vision.tiling.layout(*size) for size in await decoder.measure(images)]
    tiles, tiles_max = 0, TILE_BYTES_MAX // (3 * vision.side**2)
    for image, layout in zip(images, layouts, strict=True):
        tiles += layout.tiles
        if tiles > tiles_max:
            advice = "send fewer images, or smaller ones"
            problem = f"has {layout.tiles} tiles, and with those before it {tiles}; at most {tiles_max} are taken"
            raise bad_input(f"'{image.field}' {problem}; {advice}", image.field)
    return layouts


def with_images(
    ids: Sequence[int], images: Sequence[ImageSource], layouts: Sequence[PictureLayout], vision: Vision
) -> list[int]:
    """The ids with those of each image in its place. The template may write what stands there, no text can. Raises
    ApiError where it wrote another number of them."""
    if ids.count(vision.place) != len(layouts):
        field = images[0].field
        raise bad_input(f"'{field}': the model's chat template has no place for an image there", field)
    left = iter(layouts)
    return [id for each in ids for id in (vision.ids(next(left)) if each == vision.place else (each,))]


async def decode_images(
    decoder: ImageDecoder, images: Sequence[ImageSource], layouts: Sequence[PictureLayout], vision: Vision,
    ids: Sequence[int],
) -> list[ImageInput]:  # fmt: skip
    """The tiles of the images of the prompt that has these ids. Raises ApiError for images that are not taken."""
    decoded = await decoder.decode(images, layouts, vision.side, vision.resample)
    places = [place for place, id in enumerate(ids) if id == vision.token][:: vision.tokens]
    return [ImageInput(place, *tile) for place, tile in zip(places, decoded, strict=True)]


def pack_prompt(ids: Sequence[int], images: Sequence[ImageInput], vision: Vision | None) -> bytes:
    """The prompt's tokens as a Submit has them, which in the places of images say which these are."""
    tokens = array("I", ids)  # no array of numpy, which keeps the memory of small ones as it was
    for image in images:
        assert vision is not None
        words = [word | _ABOVE for word in array("I", image.digest)]
        tokens[image.first : image.first + vision.tokens] = array("I", islice(cycle(words), vision.tokens))
    return tokens.tobytes()
