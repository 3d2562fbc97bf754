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
