"""Which forward pass encodes a model's images."""

from collections.abc import Callable

from torch import Tensor

from engine.models.decoder_config import VisionConfig
from engine.vision.llama4_encoder import Llama4Encoder
from engine.vision.patch_layers import VisionEncoder
from engine.vision.siglip import SiglipEncoder

__all__ = ["VisionEncoder"]


def make_vision_encoder(config: VisionConfig, tensors: dict[str, Tensor], beat: Callable[[], None]) -> VisionEncoder:
    """Takes the tensors of families.vision_entries out of `tensors` one by one. Calls `beat` after each layer."""
    return (SiglipEncoder if config.shuffle is None else Llama4Encoder)(config, tensors, beat)
