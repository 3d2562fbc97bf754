"""How a model takes images, as its folder says: of what size, as how many tokens, and where its template puts them.

It knows Gemma 3's files. It reads no tensors.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

_SEEING: Final = ("Gemma3ForConditionalGeneration",)
VISION_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_BILINEAR: Final = 2
_RESAMPLINGS: Final = (0, 1, 2, 3, 4, 5)  # Pillow's


ReadJson = Callable[[Path, Any], Any]


class Vision(NamedTuple):
    """How a model takes images.

    side       of an image in pixels, to which it is scaled by Pillow's filter `resample`.
    tokens     that an image becomes.
    token      the id that stands for each of them, and never comes from a text.
    marker     what the chat template writes where an image is,
    expansion  and what the model reads there, with the token's text once.
    """

    side: int
    resample: int
    tokens: int
    token: int
    marker: str
    expansion: str


def read_vision(
    folder: Path, config: Mapping[str, Any], added_tokens: Mapping[str, int], read: ReadJson
) -> Vision | None:
    """How the model of this config.json takes images; None where it takes none, or not as it is known here. `read`
    gives a file's JSON, or a default."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or (config.get("architectures") or [""])[0] not in _SEEING:
        return None
    documents = [read(folder / name, None) for name in VISION_FILES]
    processor = next((document for document in documents if isinstance(document, Mapping)), {})
    processor = processor.get("image_processor") or processor
    text_of = {id: text for text, id in added_tokens.items()}
    token = int(config.get("image_token_index") or config.get("image_token_id") or 262_144)
    begin, end = (text_of.get(int(config.get(name) or 0)) for name in ("boi_token_index", "eoi_token_index"))
    tokens = int(config.get("mm_tokens_per_image") or 256)
    if begin is None or end is None or token not in text_of or math.isqrt(tokens) ** 2 != tokens:
        return None
    resample = processor.get("resample", _BILINEAR)
    return Vision(
        side=int(vision.get("image_size") or 224),
        resample=resample if resample in _RESAMPLINGS else _BILINEAR,
        tokens=tokens,
        token=token,
        marker=begin,
        expansion=f"\n\n{begin}{text_of[token]}{end}\n\n",
    )
