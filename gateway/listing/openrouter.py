"""The catalogue as OpenRouter asks its providers for theirs (`format=openrouter`). It knows models and their prices."""

from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from typing import Final

import msgspec

from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import ModelTask
from gateway.listing.context import ListingContext

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
_FEATURES: Final = ("json_mode", "structured_outputs", "logprobs")
_OUTPUTS: Final = {ModelTask.GENERATION: "text", ModelTask.EMBEDDINGS: "embeddings", ModelTask.CLASSIFICATION: "rerank"}
_QUANTIZATIONS: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


class Offer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model. `pricing` is in US dollars for a token, written out in full."""

    id: str
    hugging_face_id: str
    name: str
    description: str
    created: int
    input_modalities: list[str]
    output_modalities: list[str]
    quantization: str
    context_length: int
    max_output_length: int
    pricing: dict[str, str]
    supported_sampling_parameters: tuple[str, ...]
    supported_features: list[str]
    deprecation_date: date | None = None


class Offers(msgspec.Struct, frozen=True):
    data: list[Offer]


def listed(context: ListingContext, models: Sequence[Model]) -> bytes:
    return msgspec.json.encode(Offers([_offer(context, model) for model in models]))


def _offer(context: ListingContext, model: Model) -> Offer:
    writes, tokens = model.embedding_spec is None, context.fleet.context_tokens(model.name, model.context_tokens)
    sees = context.fleet.takes_images(model.name, model.vision is not None)
    return Offer(
        id=model.name,
        hugging_face_id=model.name.removeprefix("@hf/") if model.name.startswith("@hf/") else "",
        name=model.name.rpartition("/")[2],
        description=model.settings.description,
        created=int(model.created_at),
        input_modalities=["text", "image"] if sees else ["text"],
        output_modalities=[_OUTPUTS[model.task]],
        quantization=_QUANTIZATIONS.get(model.spec.dtype, "unknown"),
        context_length=tokens,
        max_output_length=tokens if writes else 0,
        pricing=_pricing(model, context.neuron_usd),
        supported_sampling_parameters=_SAMPLING if writes else (),
        supported_features=[*_FEATURES, *(["tools"] if model.function_calling else [])] if writes else [],
        deprecation_date=model.ends_on,
    )


def _pricing(model: Model, neuron_usd: float) -> dict[str, str]:
    neurons_per_million = {
        "prompt": model.price.input,
        "completion": model.price.output,
        "input_cache_read": model.price.cached_input,
        "image": 0.0,
        "request": 0.0,
    }
    usd = Decimal(str(neuron_usd)) / 1_000_000
    return {name: f"{(Decimal(str(price)) * usd).normalize():f}" for name, price in neurons_per_million.items()}
