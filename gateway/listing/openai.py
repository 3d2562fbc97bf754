"""The catalogue as OpenAI's and Anthropic's clients list it. Both ask at the same path, so that each model and the list
have the fields of both; what one of them does not know it passes over.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.catalogue.catalogue import Model
from gateway.http.exchange import Exchange
from gateway.http.json_body import decode_query
from gateway.listing.context import ListingContext
from gateway.listing.workers_ai import NoQuery

LIMIT_MAX: Final = 1000


class ModelCard(msgspec.Struct, frozen=True):
    """A model, under its name or an alias."""

    id: str
    created: int
    owned_by: str
    display_name: str
    created_at: datetime
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"


class ModelCards(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class ModelsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Anthropic's way of paging: names of models, behind or before which the page lies. OpenAI's has no pages."""

    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_MAX
    after_id: str = ""
    before_id: str = ""


def listed(gateway: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/v1/models`: each under its name and its aliases. Raises Refusal."""
    asked = decode_query(exchange.query, ModelsQuery)
    today = datetime.fromtimestamp(gateway.calendar(), UTC).date()
    named = {name: model for model in models if not model.ended(today) for name in (model.name, *model.aliases)}
    names = _between(list(named), asked)
    shown = names[-asked.limit :] if asked.before_id else names[: asked.limit]
    cards = [_card(name, named[name]) for name in shown]
    ends = (shown[0], shown[-1]) if shown else (None, None)
    return msgspec.json.encode(ModelCards(cards, len(shown) < len(names), *ends))


def one(gateway: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/v1/models/{model}`. Raises Refusal."""
    decode_query(exchange.query, NoQuery)
    name = exchange.path_params["model"]
    model = next((model for model in models if name in (model.name, *model.aliases)), None)
    if model is None:
        raise errors.no_model_of_name(name)
    return msgspec.json.encode(_card(name, model))


def _between(names: list[str], asked: ModelsQuery) -> list[str]:
    """What lies behind `after_id` and before `before_id`. Raises Refusal for names that are not in the list."""
    for field in ("after_id", "before_id"):
        if (id := getattr(asked, field)) and id not in names:
            raise errors.bad_input(f"'{field}' is none of the models in this list", field)
    start = names.index(asked.after_id) + 1 if asked.after_id else 0
    end = names.index(asked.before_id) if asked.before_id else len(names)
    return names[start:end]


def _card(name: str, model: Model) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(model.created_at),
        owned_by=model.author,
        display_name=name.rpartition("/")[2],
        created_at=model.created,
    )
