"""A prompt's images as a replica takes them: decoded, and where they are among its tokens."""

from array import array
from collections.abc import Sequence
from itertools import cycle, islice
from typing import Final

from engine.protocol.types import ImageInput
from gateway.images.decoder import ImageDecoder
from gateway.images.source import ImageSource
from gateway.images.vision import Vision

_ABOVE: Final = 1 << 31  # tokens of images are no less, and carry their digests


async def decode_images(
    decoder: ImageDecoder, images: Sequence[ImageSource], vision: Vision | None, ids: Sequence[int]
) -> list[ImageInput]:
    """The images of the prompt that has these ids, for a model that takes any. Raises ApiError for those that are not
    taken."""
    if not images or vision is None:
        return []
    decoded = await decoder.decode(images, vision.side, vision.resample)
    places = [place for place, id in enumerate(ids) if id == vision.token][:: vision.tokens]
    return [ImageInput(place, *image) for place, image in zip(places, decoded, strict=True)]


def pack_prompt(ids: Sequence[int], images: Sequence[ImageInput], vision: Vision | None) -> bytes:
    """The prompt's tokens as a Submit has them, which in the places of images say which these are."""
    tokens = array("I", ids)  # no array of numpy, which keeps the memory of small ones as it was
    for image in images:
        assert vision is not None
        words = [word | _ABOVE for word in array("I", image.digest)]
        tokens[image.first : image.first + vision.tokens] = array("I", islice(cycle(words), vision.tokens))
    return tokens.tobytes()
