"""The encoders of images that are known here, by the architectures of their models.

It reads config.json and the file of the image processor beside it, and no tensors.
"""

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Final

from engine.models.config import read_json
from engine.models.decoder_config import ModelConfigError, VisionConfig
from engine.models.parameter_entries import ParameterEntry
from engine.vision.family_parts import VisionFamily
from engine.vision.gemma3_family import Gemma3Vision
from engine.vision.llama4_family import Llama4Vision

FAMILIES: Final[Mapping[str, VisionFamily]] = {
    "Gemma3ForConditionalGeneration": Gemma3Vision(),
    "Llama4ForConditionalGeneration": Llama4Vision(),
}
PREPROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")


def read_vision_config(folder: Path) -> VisionConfig | None:
    """What encodes images for the folder's decoder; None where nothing does that is known here. Raises
    ModelConfigError."""
    config = read_json(folder / "config.json")
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    vision = config.get("vision_config")
    if family is None or vision is None:
        return None
    if not isinstance(vision, Mapping):
        raise ModelConfigError(f"vision_config must be an object, not {vision!r}")
    files = [folder / name for name in PREPROCESSOR_FILES if (folder / name).exists()]
    document = read_json(files[0]) if files else {}
    return family.config(config, vision, document.get("image_processor") or document)


def vision_entries(
    config: VisionConfig, decoder_hidden: int, stored: Container[str] | None
) -> list[ParameterEntry] | None:
    """Every parameter with its tensors, as VisionFamily.table has them."""
    family = FAMILIES["Gemma3ForConditionalGeneration" if config.shuffle is None else "Llama4ForConditionalGeneration"]
    return family.table(config, decoder_hidden, stored)
