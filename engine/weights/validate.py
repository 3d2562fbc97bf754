"""Whether a folder's weights are whole and are those of its config.json, from headers alone. It moves no weights.

    python -m engine.weights.validate '<ModelSpec JSON>'

It prints what a replica would load, as a line of JSON (protocol.reports.InspectionReport). What is wrong is its last
line on stderr, with exit status 1 where it is the weights, and 2 where it is config.json. Nothing here needs torch, so
that it takes a tenth of a second.
"""

import math
import sys
from pathlib import Path

import msgspec

from engine.bf12.layout import GROUP_OUTPUTS, words_of
from engine.models.config import DECODER_ARCHITECTURES as DECODERS
from engine.models.config import ENCODER_ARCHITECTURES as ENCODERS
from engine.models.config import (
    HEADLESS,
    EncoderConfig,
    ModelConfig,
    ModelConfigError,
    is_encoder,
    read_decoder_config,
    read_encoder_config,
    read_json,
)
from engine.models.weight_names import ParameterEntry, TensorSource, required_tensors
from engine.protocol.reports import InspectionReport
from engine.protocol.specs import ModelSpec
from engine.vision.families import read_vision_config, vision_entries
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.tensor_index import bf12_escapes


def inspect_weights(model: ModelSpec) -> InspectionReport:
    """What a replica would load of the folder. Raises ModelConfigError or CheckpointError."""
    folder = Path(model.folder)
    _require_known(folder)
    config = read_encoder_config(folder) if is_encoder(folder) else read_decoder_config(folder, vectors=model.vectors)
    if model.context_tokens is not None and model.context_tokens > config.context_tokens:
        raise ModelConfigError(
            f"context_tokens {model.context_tokens} is more than the model's {config.context_tokens}"
        )
    checkpoint = Checkpoint(folder)
    if config.layers > len(checkpoint.tensors):
        raise CheckpointError(f"{folder} has {len(checkpoint.tensors)} tensors for the {config.layers} layers it names")
    table, is_unused = required_tensors(config, checkpoint.tensors)
    checkpoint.require(table, is_unused)
    seeing = _require_vision(folder, config, checkpoint)
    decoder = [] if isinstance(config, EncoderConfig) else table
    bf12 = [(entry, count) for entry in decoder if (count := bf12_escapes(entry, checkpoint.tensors)) is not None]
    in_fp8 = [source for entry in decoder if all(own.is_fp8 for own in entry.sources) for source in entry.sources]
    return InspectionReport(
        numbers=_numbers(table),
        image_numbers=_numbers(seeing),
        coded_numbers=sum(math.prod(source.shape) for entry, _ in bf12 for source in entry.sources)
        + sum(math.prod(source.shape) for source in in_fp8),
        coded_bytes=sum(_bf12_bytes(entry, escapes) for entry, escapes in bf12) + sum(map(_fp8_bytes, in_fp8)),
    )


def _require_vision(folder: Path, config: ModelConfig | EncoderConfig, checkpoint: Checkpoint) -> list[ParameterEntry]:
    """The parameters of what encodes images, none where nothing does. Raises ModelConfigError or CheckpointError."""
    vision = None if isinstance(config, EncoderConfig) else read_vision_config(folder)
    table = None if vision is None else vision_entries(vision, config.hidden, checkpoint.tensors)
    checkpoint.require(table or [], lambda name: True)
    return table or []


def _numbers(table: list[ParameterEntry]) -> int:
    return sum(math.prod(source.placed) for entry in table for source in entry.sources)


def _bf12_bytes(entry: ParameterEntry, escapes: int) -> int:
    """The bytes of a parameter's words and of its escape index, as formats.py has them, which needs torch."""
    outputs, inputs = sum(source.shape[0] for source in entry.sources), entry.sources[0].shape[1]
    groups = -(-outputs // GROUP_OUTPUTS)
    return 4 * (outputs * words_of(inputs) + outputs + groups + 1) + (4 + 2) * escapes


def _fp8_bytes(source: TensorSource) -> int:
    """The bytes of numbers and of the factors that each output has in memory, as formats.py has them."""
    assert source.scales is not None
    outputs, inputs = source.shape
    shape = source.scales.shapes[0]
    return outputs * (inputs + 4 * (shape[1] if len(shape) == 2 else 1))


def _require_known(folder: Path) -> None:
    """Raises ModelConfigError, which lists decoders and encoders alike."""
    names = read_json(folder / "config.json").get("architectures")
    known = (*DECODERS, *HEADLESS, *ENCODERS)
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ModelConfigError(f"{folder}: architectures {names!r} is not supported; one of {', '.join(known)} is")


def main() -> int:
    model = msgspec.json.decode(sys.argv[1], type=ModelSpec)
    try:
        print(msgspec.json.encode(inspect_weights(model)).decode())
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except ModelConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # an entry of a type that no model has
        print(f"{model.folder}/config.json cannot be understood: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
