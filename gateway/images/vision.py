"""How a model takes images, as its folder says: of what size, as how many tokens, and where its template puts them.

It knows the files of Gemma 3 and Llama 4. It reads no tensors.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.images.tiling import PictureLayout, Tiling

VISION_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_BILINEAR: Final = 2
_RESAMPLINGS: Final = (0, 1, 2, 3, 4, 5)  # Pillow's
_AROUND_TILES: Final = (
    *("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<|image|>", "<|image_end|>"),
)


ReadJson = Callable[[Path, Any], Any]
Entries = Mapping[str, Any]


class Vision(NamedTuple):
    """How a model takes images.

    side       of an image in pixels, to which it is scaled by Pillow's filter `resample`.
    tokens     that an image becomes.
    token      the id that stands for each of them, and never comes from a text.
    marker     what the chat template writes where an image is,
    expansion  and what the model reads there, in which the id `place` stands once for the image's tokens.
    tiling     how a picture is cut into images of that size; None: it is one, of that size.
    """

    side: int
    resample: int
    tokens: int
    token: int
    marker: str
    expansion: str
    place: int
    tiling: Tiling | None = None

    @property
    def whole(self) -> PictureLayout:
        """A picture that is one image."""
        return PictureLayout(self.side, self.side)

    def ids(self, layout: PictureLayout) -> list[int]:
        """What stands at a picture's place in a prompt."""
        tile = [self.token] * self.tokens
        return tile if self.tiling is None else self.tiling.ids(layout, tile)


def read_vision(folder: Path, config: Entries, added_tokens: Mapping[str, int], read: ReadJson) -> Vision | None:
    """How the model of this config.json takes images; None where it takes none, or not as it is known here. `read`
    gives a file's JSON, or a default."""
    vision = config.get("vision_config")
    reads = _FAMILIES.get((config.get("architectures") or [""])[0])
    if not isinstance(vision, Mapping) or reads is None:
        return None
    documents = [read(folder / name, None) for name in VISION_FILES]
    processor = next((document for document in documents if isinstance(document, Mapping)), {})
    return reads(config, vision, processor.get("image_processor") or processor, added_tokens)


def _gemma3(config: Entries, vision: Entries, processor: Entries, added_tokens: Mapping[str, int]) -> Vision | None:
    text_of = {id: text for text, id in added_tokens.items()}
    token = int(config.get("image_token_index") or config.get("image_token_id") or 262_144)
    begin, end = (text_of.get(int(config.get(name) or 0)) for name in ("boi_token_index", "eoi_token_index"))
    tokens = int(config.get("mm_tokens_per_image") or 256)
    if begin is None or end is None or token not in text_of or math.isqrt(tokens) ** 2 != tokens:
        return None
    return Vision(
        side=int(vision.get("image_size") or 224),
        resample=_resample(processor),
        tokens=tokens,
        token=token,
        marker=begin,
        expansion=f"\n\n{begin}{text_of[token]}{end}\n\n",
        place=token,
    )


def _llama4(config: Entries, vision: Entries, processor: Entries, added_tokens: Mapping[str, int]) -> Vision | None:
    token = int(config.get("image_token_index") or config.get("image_token_id") or 200_092)
    side, patch = int(vision.get("image_size") or 448), int(vision.get("patch_size") or 14)
    size, ratio = processor.get("size") or {}, float(vision.get("pixel_shuffle_ratio") or 0.5)
    around = [added_tokens.get(text) for text in _AROUND_TILES]
    begin, across, down, whole, end = (-1 if id is None else id for id in around)
    sized = all(size.get(name, side) == side for name in ("height", "width"))
    if None in around or token not in added_tokens.values() or not sized:
        return None
    tiles_max, enlarges = int(processor.get("max_patches") or 16), bool(processor.get("resize_to_max_canvas"))
    return Vision(
        side=side,
        resample=_resample(processor),
        tokens=round(side // patch * ratio) ** 2,
        token=token,
        marker=_AROUND_TILES[3],
        expansion=_AROUND_TILES[3],
        place=whole,
        tiling=Tiling(side, tiles_max, enlarges, begin, across, down, whole, end),
    )


def _resample(processor: Entries) -> int:
    resample = processor.get("resample", _BILINEAR)
    return resample if resample in _RESAMPLINGS else _BILINEAR


_FAMILIES: Final = {"Gemma3ForConditionalGeneration": _gemma3, "Llama4ForConditionalGeneration": _llama4}
