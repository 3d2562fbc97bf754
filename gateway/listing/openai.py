"""The catalogue as OpenAI's and Anthropic's clients list it. Both ask at the same path, so each model and the list have
the fields of both; a client ignores those that it does not know.
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
    """Anthropic's paging: names of models, after or before which the page lies. OpenAI's has no pages."""

    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_MAX
    after_id: str = ""
    before_id: str = ""


def listed(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/v1/models`: each under its name and its aliases. Raises ApiError."""
    options = decode_query(exchange.query, ModelsQuery)
    today = datetime.fromtimestamp(context.calendar(), UTC).date()
    by_name = {
        name: model for model in models if not model.ended(today) for name in (model.name, *model.settings.aliases)
    }
    names = _between(list(by_name), options)
    page = names[-options.limit :] if options.before_id else names[: options.limit]
    cards = [_card(name, by_name[name]) for name in page]
    ends = (page[0], page[-1]) if page else (None, None)
    return msgspec.json.encode(ModelCards(cards, len(page) < len(names), *ends))


def one(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/v1/models/{model}`. Raises ApiError."""
    decode_query(exchange.query, NoQuery)
    name = exchange.path_params["model"]
    model = context.find(models, name)
    if model is None:
        raise errors.no_model_of_name(name, context.did_you_mean(models, name))
    return msgspec.json.encode(_card(name, model))


def _between(names: list[str], options: ModelsQuery) -> list[str]:
    """Returns the names after `after_id` and before `before_id`. Raises ApiError for names that are not in the list."""
    for field in ("after_id", "before_id"):
        if (id := getattr(options, field)) and id not in names:
            raise errors.bad_input(f"'{field}' is none of the models in this list", field)
    start = names.index(options.after_id) + 1 if options.after_id else 0
    end = names.index(options.before_id) if options.before_id else len(names)
    return names[start:end]


def _card(name: str, model: Model) -> ModelCard:
    return ModelCard(
        id=name,
        created=int(model.created_at),
        owned_by=model.author,
        display_name=name.rpartition("/")[2],
        created_at=model.created,
    )
