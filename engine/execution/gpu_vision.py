"""What encodes a model's images on a GPU, whose parameters lie behind the decoder's in one buffer: they come last when
the model wakes, and no step waits for them."""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from engine.execution.gpu_memory import GpuMemory
from engine.images.gpu_images import GpuImageEncoder
from engine.memory.virtual_memory import Arena
from engine.models.decoder_config import VisionConfig
from engine.vision.encoders import VisionEncoder
from engine.weights.device_buffer import WeightBuffer
from engine.weights.source import ShardSource, WeightSource

_PREFIX: Final = "vision."


def reserve_weights(arena: Arena, own: ShardSource | WeightSource, source: WeightSource) -> WeightBuffer:
    """Takes memory for a decoder, or one rank's part of it, and for what encodes images, if the source has that. Raises
    OutOfDeviceMemory."""
    vision = {_PREFIX + name: shape for name, shape in source.vision_shapes.items()}
    return WeightBuffer(arena, {**own.shapes, **vision})


def decoder_tensors(weights: WeightBuffer) -> dict[str, Tensor]:
    """The tensors of the decoder alone."""
    return {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(_PREFIX)}


def load_vision(source: WeightSource, weights: WeightBuffer, beat: Callable[[], None]) -> VisionEncoder | None:
    """None where nothing encodes images. Raises as WeightSource.load."""
    if not source.vision_table:
        return None
    return source.load_vision(beat, {name: weights.tensors[_PREFIX + name] for name in source.vision_shapes})


def add_images(memory: GpuMemory, config: VisionConfig | None, encoder: VisionEncoder | None) -> None:
    """Has the encoder's rows come into the buffer that steps read, and the encoder sleep and wake with the model."""
    if config is not None and encoder is not None:
        memory.images = GpuImageEncoder(config, encoder, memory.buffers.embeddings_EH, memory.stream)
