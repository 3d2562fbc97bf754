"""The catalogue as OpenRouter asks its providers for theirs (`format=openrouter`). It knows models and their prices."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec

from gateway.catalogue import Model
from gateway.request import Gateway

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "seed",
    "max_tokens",
    "logit_bias",
)
_QUANTIZATIONS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def listed(gateway: Gateway, models: Sequence[Model]) -> bytes:
    return msgspec.json.encode({"data": [_item(gateway, model) for model in models]})


def _item(gateway: Gateway, model: Model) -> dict[str, Any]:
    tokens = gateway.context_tokens(model)
    item = {
        "id": model.name,
        "hugging_face_id": model.name.removeprefix("@hf/") if model.name.startswith("@hf/") else "",
        "name": model.name.rpartition("/")[2],
        "description": model.description,
        "created": int(model.created_at),
        "input_modalities": ["text"],
        "output_modalities": ["text"],
        "quantization": _QUANTIZATIONS.get(model.spec.dtype, "unknown"),
        "context_length": tokens,
        "max_output_length": tokens,
        "pricing": _pricing(model, gateway.limits.neuron_usd),
        "supported_sampling_parameters": _SAMPLING,
        "supported_features": ["logprobs", *(["tools"] if model.function_calling else [])],
    }
    return item if model.ends_on is None else {**item, "deprecation_date": model.ends_on.isoformat()}


def _pricing(model: Model, neuron_usd: float) -> dict[str, str]:
    """US dollars for a token, written out in full."""
    neurons_per_million = {
        "prompt": model.price.input,
        "completion": model.price.output,
        "input_cache_read": model.price.cached_input,
        "image": 0.0,
        "request": 0.0,
    }
    usd = Decimal(str(neuron_usd)) / 1_000_000
    return {name: _written(Decimal(str(price)) * usd) for name, price in neurons_per_million.items()}


def _written(price: Decimal) -> str:
    return f"{price.normalize():f}"
