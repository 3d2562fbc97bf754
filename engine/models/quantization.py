"""config.json's quantization_config → how a checkpoint's weights are stored. It reads no tensors.

Read are gpt-oss's mxfp4, and fp8 (e4m3) as checkpoints have it for tensor cores: a factor for each tensor, for each
output, or for each block of 128 × 128. Activations are in 8 bits, if at all, by factors that are found as they come:
factors that a file has for them are not needed.
"""

from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any, Final

from engine.models.decoder_config import Fp8Scales, ModelConfigError
from engine.models.parameter_entries import NumberPacking, ParameterEntry, TensorScales, TensorSource

SCALE_BLOCK: Final = 128
_STRATEGIES: Final = {"tensor": Fp8Scales.TENSOR, "channel": Fp8Scales.CHANNEL, "block": Fp8Scales.BLOCK}
_READ: Final = (
    "bf16, f16 and f32 are, fp8 by 'fp8' or 'compressed-tensors' (float-quantized: tensor, channel, or blocks of "
    "128 x 128), and mxfp4 for GptOssForCausalLM"
)


def fp8_scales(config: Mapping[str, Any], architecture: str) -> Fp8Scales | None:
    """What the factors of fp8 weights are of; None where weights are in no fp8. Raises ModelConfigError for what is not
    read, and says what is."""
    entry = config.get("quantization_config") or config.get("compression_config")
    if not entry:
        return None
    method = entry.get("quant_method", "") if isinstance(entry, Mapping) else entry
    if method == "mxfp4" and architecture == "GptOssForCausalLM":
        return None
    scales = None
    if method == "fp8":
        block = entry.get("weight_block_size")
        scales = Fp8Scales.TENSOR if block is None else _blocks(block)
    if method == "compressed-tensors":
        scales = _compressed_tensors(entry)
    if scales is None:
        raise ModelConfigError(f"quantization_config {method!r} of {architecture} is not supported: {_READ}")
    return scales


def _compressed_tensors(entry: Mapping[str, Any]) -> Fp8Scales | None:
    groups = entry.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    if not weights or any((each.get("num_bits"), each.get("type")) != (8, "float") for each in weights):
        return None
    kinds = {_STRATEGIES.get(str(each.get("strategy"))) for each in weights}
    if kinds == {Fp8Scales.BLOCK}:
        return _blocks(weights[0].get("block_structure"))
    return kinds.pop() if len(kinds) == 1 else None


def _blocks(sizes: Any) -> Fp8Scales | None:
    return Fp8Scales.BLOCK if sizes == [SCALE_BLOCK, SCALE_BLOCK] else None


def packed_entries(table: list[ParameterEntry], stored: Container[str], scales: Fp8Scales) -> list[ParameterEntry]:
    """The entries, with the factors of those weights that the checkpoint has some of, by their names."""
    return [
        replace(entry, sources=tuple(_packed(source, stored, scales) for source in entry.sources)) for entry in table
    ]


def is_unused_scale(name: str) -> bool:
    """Factors of activations, and of keys and values."""
    return name.endswith((".input_scale", ".k_scale", ".v_scale", ".output_scale"))


def _packed(source: TensorSource, stored: Container[str], scales: Fp8Scales) -> TensorSource:
    names = [f"{source.name}{suffix}" for suffix in ("_scale_inv", "_scale")]
    name = next((name for name in names if name in stored), None)
    if name is None or len(source.shape) != 2:
        return source
    outputs, inputs = source.shape
    match scales:
        case Fp8Scales.TENSOR:
            shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
        case Fp8Scales.CHANNEL:
            shapes = ((outputs, 1), (outputs,))
        case Fp8Scales.BLOCK:
            shapes = ((-(-outputs // SCALE_BLOCK), -(-inputs // SCALE_BLOCK)),)
    return replace(source, scales=TensorScales(name, shapes, NumberPacking.FP8))
