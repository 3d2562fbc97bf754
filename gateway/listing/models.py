"""The catalogue as Workers AI shows it: the search of models, their tasks and their authors.

It does not know who asks: it is given the models that they may see.
"""

import uuid
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from gateway.body import asked_in
from gateway.catalogue import Model
from gateway.listing import marketplace
from gateway.listing.pages import PAGE_MAX, sliced
from gateway.request import Gateway

PER_PAGE_MAX: Final = 1000
PER_PAGE_DEFAULT: Final = 100
SHOWN_AFTER_END: Final = timedelta(days=92)  # how long `include_deprecated` shows a model that is served no more
_NAMESPACE: Final = uuid.UUID("0c1f6d0a-7c57-4b0e-8a55-2f5d4a1f6b3e")
# Their ids are those of Workers AI, which clients may have learnt.
_TASKS: Final = {
    "Text Generation": ("c329a1f9-323d-4e91-b2aa-582dd4188d34", "Generates text from a prompt or from messages."),
    "Text Embeddings": (
        "0137cdcf-162a-4108-94f2-1ca59e8c65ee",
        "Turns texts into vectors that are near where they are.",
    ),
    "Text Classification": (
        "19606750-23ed-4371-aab2-c20349b53a60",
        "Scores texts, such as how well they answer a query.",
    ),
}
_SOURCES: Final = {"@hf": 2}  # everything else is 1, as there

YesNo = Literal["true", "false", "1", "0"]


class SearchQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`task` is a task's name or id; `source` is 1, or 2 for the models of the Hugging Face hub."""

    search: str = ""
    task: str = ""
    author: str = ""
    source: Annotated[str, Meta(pattern=r"^([0-9]{1,9}(\.0)?)?$")] = ""
    hide_experimental: YesNo = "false"
    include_deprecated: YesNo = "false"
    page: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = 1
    per_page: Annotated[int, Meta(ge=1, le=PER_PAGE_MAX)] = PER_PAGE_DEFAULT
    format: Literal["", "openrouter"] = ""


class NoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of a list that has none."""


def search(gateway: Gateway, models: Sequence[Model], query: bytes) -> bytes:
    """`/ai/models/search`. Raises Refusal."""
    asked = asked_in(query, SearchQuery)
    today = datetime.fromtimestamp(gateway.calendar(), UTC).date()
    found, page = sliced([model for model in models if _matches(model, asked, today)], asked.page, asked.per_page)
    if asked.format == "openrouter":
        return marketplace.listed(gateway, found)
    return _listed([_item(gateway, model) for model in found], page)


def tasks(gateway: Gateway, models: Sequence[Model], query: bytes) -> bytes:
    """`/ai/tasks/search`: what the models do. Raises Refusal."""
    asked_in(query, NoQuery)
    return _all([_task(name) for name in sorted({model.task for model in models})])


def authors(gateway: Gateway, models: Sequence[Model], query: bytes) -> bytes:
    """`/ai/authors/search`: who the models' names say that they are from. Raises Refusal."""
    asked_in(query, NoQuery)
    names = sorted({model.author for model in models})
    return _all([{"id": str(uuid.uuid5(_NAMESPACE, name)), "name": name} for name in names])


def _all(items: list[dict[str, Any]]) -> bytes:
    """A list that is one page."""
    return _listed(items, {"count": len(items), "page": 1, "per_page": len(items), "total_count": len(items)})


def _listed(items: list[dict[str, Any]], page: dict[str, int]) -> bytes:
    return msgspec.json.encode({"result": items, "success": True, "errors": [], "messages": [], "result_info": page})


def _matches(model: Model, asked: SearchQuery, today: date) -> bool:
    task, author = asked.task.lower(), asked.author.lower()
    since_end = timedelta(0) if model.ends_on is None else today - model.ends_on
    return (
        asked.search.lower() in f"{model.name} {model.description}".lower()
        and task in ("", model.task.lower(), _TASKS[model.task][0])
        and author in ("", model.author.lower())
        and asked.source.removesuffix(".0") in ("", str(_source(model)))
        and not (model.beta and _yes(asked.hide_experimental))
        and (not model.ended(today) or (_yes(asked.include_deprecated) and since_end <= SHOWN_AFTER_END))
    )


def _yes(word: YesNo) -> bool:
    return word in ("true", "1")


def _source(model: Model) -> int:
    return _SOURCES.get(model.name.partition("/")[0], 1)


def _task(name: str) -> dict[str, str]:
    id, description = _TASKS[name]
    return {"id": id, "name": name, "description": description}


def _item(gateway: Gateway, model: Model) -> dict[str, Any]:
    properties = _properties(gateway, model)
    return {
        "id": model.id,
        "source": _source(model),
        "name": model.name,
        "description": model.description,
        "task": _task(model.task),
        "created_at": datetime.fromtimestamp(int(model.created_at), UTC).isoformat(),
        "tags": model.tags,
        "properties": [{"property_id": name, "value": value} for name, value in properties.items() if value],
    }


def _properties(gateway: Gateway, model: Model) -> dict[str, Any]:
    """By id, in strings as there, all but the price; what is empty is left out."""
    tokens = str(gateway.context_tokens(model))
    return {
        "context_window": tokens,
        "price": _prices(model),
        "function_calling": "true" if model.function_calling else "",
        "beta": "true" if model.beta else "",
        "planned_deprecation_date": "" if model.ends_on is None else model.ends_on.isoformat(),
        "terms": model.terms,
        "info": model.info,
    }


def _prices(model: Model) -> list[dict[str, Any]]:
    neurons = {
        "per M input tokens": model.price.input,
        "per M cached input tokens": model.price.cached_input,
        "per M output tokens": model.price.output,
    }
    return [{"unit": unit, "price": price, "currency": "neurons"} for unit, price in neurons.items()]
