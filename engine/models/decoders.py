"""Which forward pass a model takes."""

from engine.models.cpu_row_decoder import CpuRowDecoder, row_decoder
from engine.models.decoder_config import ModelConfig
from engine.models.gemma import GemmaDecoder
from engine.models.llama import DecoderParameters, LlamaDecoder

__all__ = ["CpuRowDecoder", "DecoderParameters", "row_decoder"]

Decoder = LlamaDecoder | GemmaDecoder


def make_decoder(config: ModelConfig, parameters: DecoderParameters) -> Decoder:
    if config.architecture.startswith("Gemma"):
        return GemmaDecoder(parameters)
    return LlamaDecoder(parameters)
