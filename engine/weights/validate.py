"""Whether a folder's weights are whole and are those of its config.json, found from headers alone. It moves no weights.

    python -m engine.weights.validate '<ModelSpec JSON>'

It prints what a replica would load, as a line of JSON (wire.Inspected). What is wrong is its last line on stderr, with
exit status 1 where it is the weights, and 2 where it is config.json. Nothing here needs torch, so that looking takes a
tenth of a second.
"""

import math
import sys
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import msgspec

from engine.bf12.layout import GROUP_OUTPUTS, words_of
from engine.models.config import ARCHITECTURES as DECODERS
from engine.models.config import HEADLESS, ConfigError, ModelConfig, read_config, read_json
from engine.models.encoder_config import ARCHITECTURES as ENCODERS
from engine.models.encoder_config import EncoderConfig, is_encoder, read_encoder_config
from engine.models.encoder_names import encoder_entries, encoder_spare
from engine.models.encoder_names import prefix_of as encoder_prefix_of
from engine.models.weight_names import Entry, entries, ignored, prefix_of
from engine.protocol.reports import Inspected
from engine.protocol.specs import ModelSpec
from engine.weights.checkpoint import Checkpoint, CheckpointError
from engine.weights.tensor_index import Code, codes_of


def inspect(model: ModelSpec) -> Inspected:
    """Raises ConfigError or CheckpointError."""
    folder = Path(model.folder)
    _require_known(folder)
    config = read_encoder_config(folder) if is_encoder(folder) else read_config(folder, vectors=model.vectors)
    if model.context_tokens is not None and model.context_tokens > config.context_tokens:
        raise ConfigError(f"context_tokens {model.context_tokens} is more than the model's {config.context_tokens}")
    checkpoint = Checkpoint(folder)
    if config.layers > len(checkpoint.tensors):
        raise CheckpointError(f"{folder} has {len(checkpoint.tensors)} tensors for the {config.layers} layers it names")
    table, spare = _wanted(config, checkpoint.tensors)
    sources = [source for entry in table for source in entry.sources]
    checkpoint.require(sources, spare)
    decoder = [] if isinstance(config, EncoderConfig) else table
    coded = [(entry, codes) for entry in decoder if (codes := codes_of(entry, checkpoint.tensors))]
    return Inspected(
        numbers=sum(math.prod(source.shape) for source in sources),
        coded_numbers=sum(math.prod(source.shape) for entry, _ in coded for source in entry.sources),
        coded_bytes=sum(_coded_bytes(entry, codes) for entry, codes in coded),
    )


def _coded_bytes(entry: Entry, codes: Iterable[Code]) -> int:
    """Of its words, and of the index of what they leave out (forms.py, which needs torch)."""
    outputs, inputs = sum(source.shape[0] for source in entry.sources), entry.sources[0].shape[1]
    escapes, groups = sum(code.values.numbers for code in codes), -(-outputs // GROUP_OUTPUTS)
    return 4 * (outputs * words_of(inputs) + outputs + groups + 1) + (4 + 2) * escapes


def _require_known(folder: Path) -> None:
    """Raises ConfigError, which lists decoders and encoders alike."""
    named = read_json(folder / "config.json").get("architectures")
    known = (*DECODERS, *HEADLESS, *ENCODERS)
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        raise ConfigError(f"{folder}: architectures {named!r} is not supported; one of {', '.join(known)} is")


def _wanted(config: ModelConfig | EncoderConfig, stored: Container[str]) -> tuple[list[Entry], Callable[[str], bool]]:
    """Every parameter with its tensors, and what else may be stored."""
    if isinstance(config, EncoderConfig):
        prefix = encoder_prefix_of(stored)
        return encoder_entries(config, prefix), lambda name: encoder_spare(config, prefix, name)
    return entries(config, prefix_of(stored)), lambda name: ignored(config, name)


def main() -> int:
    model = msgspec.json.decode(sys.argv[1], type=ModelSpec)
    try:
        print(msgspec.json.encode(inspect(model)).decode())
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # an entry of another kind than any model's
        print(f"{model.folder}/config.json cannot be understood: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
