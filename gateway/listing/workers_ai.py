"""The catalogue as Workers AI shows it: the search of models, their tasks and their authors.

It does not know the caller: it gets the models that the caller may see.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway.catalogue.catalogue import Model
from gateway.http.exchange import Exchange
from gateway.http.json_body import decode_query
from gateway.listing import openrouter
from gateway.listing.context import ListingContext
from gateway.listing.pages import PAGE_MAX, Listed, PageItem, sliced

PER_PAGE_MAX: Final = 1000
PER_PAGE_DEFAULT: Final = 100
SHOWN_AFTER_END: Final = timedelta(days=92)  # how long `include_deprecated` shows a model that is no longer served
_NAMESPACE: Final = uuid.UUID("0c1f6d0a-7c57-4b0e-8a55-2f5d4a1f6b3e")
_SOURCES: Final = {"@hf": 2}  # all others are 1, as in Workers AI

YesNo = Literal["true", "false", "1", "0"]
_YES: Final = ("true", "1")


class SearchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`task` is a task's name or id; `source` is 1, or 2 for the models of the Hugging Face hub."""

    search: str = ""
    task: str = ""
    author: str = ""
    source: Annotated[str, Meta(pattern=r"^([0-9]{1,9}(\.0)?)?$(?!\n)")] = ""
    hide_experimental: YesNo = "false"
    include_deprecated: YesNo = "false"
    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=PER_PAGE_MAX)] = PER_PAGE_DEFAULT
    format: Literal["", "openrouter"] = ""


class Price(msgspec.Struct, frozen=True):
    """The price of a million tokens of one kind, which `unit` names."""

    unit: str
    price: float
    currency: Literal["neurons"] = "neurons"


class Property(msgspec.Struct, frozen=True):
    """A fact about a model; all but prices are texts."""

    property_id: str
    value: str | list[Price]


class Task(msgspec.Struct, frozen=True):
    id: str
    name: str
    description: str


class Author(msgspec.Struct, frozen=True):
    """The author that a model's name states."""

    id: str
    name: str


class ModelItem(msgspec.Struct, frozen=True):
    """A model as the search shows it."""

    id: str
    source: int
    name: str
    description: str
    task: Task
    created_at: datetime
    tags: list[str]
    properties: list[Property]


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list that has none."""


# The ids are those of Workers AI, which clients may know.
_TASKS: Final = (
    Task("c329a1f9-323d-4e91-b2aa-582dd4188d34", "Text Generation", "Writes text from a prompt or from messages."),
    Task(
        "0137cdcf-162a-4108-94f2-1ca59e8c65ee",
        "Text Embeddings",
        "Turns texts into vectors, near where they are alike.",
    ),
    Task(
        "19606750-23ed-4371-aab2-c20349b53a60",
        "Text Classification",
        "Scores texts, as by how well they answer a query.",
    ),
)


def search(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/ai/models/search`. Raises ApiError."""
    options = decode_query(exchange.query, SearchQuery)
    today = datetime.fromtimestamp(context.calendar(), UTC).date()
    matches = [model for model in models if _matches(model, options, today)]
    part, page = sliced(matches, options.page, options.per_page)
    if options.format == "openrouter":
        return openrouter.listed(context, part)
    return msgspec.json.encode(Listed([_item(context, model) for model in part], page))


def tasks(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/ai/tasks/search`: the tasks of the models. Raises ApiError."""
    decode_query(exchange.query, NoQuery)
    return _all([task for task in _TASKS if task.name in {model.task for model in models}])


def authors(context: ListingContext, models: Sequence[Model], exchange: Exchange) -> bytes:
    """`/ai/authors/search`. Raises ApiError."""
    decode_query(exchange.query, NoQuery)
    names = sorted({model.author for model in models})
    return _all([Author(str(uuid.uuid5(_NAMESPACE, name)), name) for name in names])


def _all(items: Sequence[Task | Author]) -> bytes:
    """Renders a list that is one page."""
    return msgspec.json.encode(Listed(items, PageItem(len(items), 1, len(items), len(items))))


def _matches(model: Model, options: SearchQuery, today: date) -> bool:
    since_end = timedelta(0) if model.ends_on is None else today - model.ends_on
    return (
        options.search.lower() in f"{model.name} {model.settings.description}".lower()
        and options.task.lower() in ("", model.task.lower(), _task(model).id)
        and options.author.lower() in ("", model.author.lower())
        and options.source.removesuffix(".0") in ("", str(_source(model)))
        and not (model.settings.beta and options.hide_experimental in _YES)
        and (not model.ended(today) or (options.include_deprecated in _YES and since_end <= SHOWN_AFTER_END))
    )


def _source(model: Model) -> int:
    return _SOURCES.get(model.name.partition("/")[0], 1)


def _task(model: Model) -> Task:
    return next(task for task in _TASKS if task.name == model.task)


def _item(context: ListingContext, model: Model) -> ModelItem:
    properties = _properties(context, model)
    return ModelItem(
        id=model.id,
        source=_source(model),
        name=model.name,
        description=model.settings.description,
        task=_task(model),
        created_at=model.created,
        tags=model.settings.tags,
        properties=[Property(name, value) for name, value in properties.items() if value],
    )


def _properties(context: ListingContext, model: Model) -> dict[str, str | list[Price]]:
    """The properties by id; empty ones are left out."""
    return {
        "context_window": str(context.fleet.context_tokens(model.name, model.context_tokens)),
        "max_input_tokens": "" if model.embedding_spec is None else str(model.embedding_spec.tokens_max),
        "output_dimensions": str(model.embedding_spec.dimensions or "") if model.embedding_spec is not None else "",
        "price": _prices(model),
        "function_calling": "true" if model.function_calling else "",
        "reasoning": "true" if model.has_reasoning else "",
        "vision": "true" if context.fleet.takes_images(model.name, model.vision is not None) else "",
        "async_queue": "true",
        "beta": "true" if model.settings.beta else "",
        "planned_deprecation_date": "" if model.ends_on is None else model.ends_on.isoformat(),
        "terms": model.settings.terms,
        "info": model.settings.info,
    }


def _prices(model: Model) -> list[Price]:
    read = [
        Price("per M input tokens", model.price.input),
        Price("per M cached input tokens", model.price.cached_input),
    ]
    return read if model.embedding_spec is not None else [*read, Price("per M output tokens", model.price.output)]
