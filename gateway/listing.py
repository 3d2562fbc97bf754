"""The catalogue as callers see it: the search page of the native API and OpenAI's list of models; and pages of lists.

It does not know who asks: it is given the models that they may see.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from gateway.body import options
from gateway.catalogue import Model
from gateway.errors import bad_input

T = TypeVar("T")

PAGE_MAX: Final = 1_000_000
PER_PAGE_MAX: Final = 1000
PER_PAGE_DEFAULT: Final = 100
_TASK_ID: Final = "c329a1f9-323d-4e91-b2aa-582dd4188d34"


def search(models: Iterable[Model], query: bytes) -> bytes:
    """`/ai/models/search`: filters `search`, `task`, `author`; `page` and `per_page`, empty past the end."""
    asked = options(query)
    wanted = {name: asked.get(name, "").lower() for name in ("search", "task", "author")}
    found = [model for model in models if _matches(model, wanted)]
    shown, info = page_of(found, asked, per_page=PER_PAGE_DEFAULT, most=PER_PAGE_MAX)
    body = {
        "result": [_item(model) for model in shown],
        "success": True,
        "errors": [],
        "messages": [],
        "result_info": info,
    }
    return msgspec.json.encode(body)


def page_of(found: Sequence[T], asked: dict[str, str], per_page: int, most: int) -> tuple[Sequence[T], dict[str, int]]:
    """The page that `page` and `per_page` ask for, empty past the end, and its `result_info`. Raises Refusal."""
    page = _whole(asked, "page", 1, PAGE_MAX)
    per_page = _whole(asked, "per_page", per_page, most)
    return sliced(found, page, per_page)


def sliced(found: Sequence[T], page: int, per_page: int) -> tuple[Sequence[T], dict[str, int]]:
    shown = found[(page - 1) * per_page : page * per_page]
    return shown, {"count": len(shown), "page": page, "per_page": per_page, "total_count": len(found)}


def openai(models: Iterable[Model], query: bytes) -> bytes:
    """`/v1/models`."""
    data = [
        {"id": model.name, "object": "model", "created": int(model.created_at), "owned_by": _author(model)}
        for model in models
    ]
    return msgspec.json.encode({"object": "list", "data": data})


def _matches(model: Model, wanted: dict[str, str]) -> bool:
    text = f"{model.name} {model.description}".lower()
    return (
        wanted["search"] in text
        and wanted["task"] in ("", model.task.lower(), _TASK_ID)
        and wanted["author"] in ("", _author(model).lower())
    )


def _author(model: Model) -> str:
    """`@cf/hearth/ember` → `hearth`."""
    return model.name.split("/")[1]


def _item(model: Model) -> dict[str, Any]:
    properties: list[dict[str, Any]] = [{"property_id": "context_window", "value": str(model.context_tokens)}]
    price = {
        "per M input tokens": model.price.input,
        "per M cached input tokens": model.price.cached_input,
        "per M output tokens": model.price.output,
    }
    value = [{"unit": unit, "price": neurons, "currency": "neurons"} for unit, neurons in price.items()]
    properties.append({"property_id": "price", "value": value})
    if model.function_calling:
        properties.append({"property_id": "function_calling", "value": "true"})
    return {
        "id": model.id,
        "source": 1,
        "name": model.name,
        "description": model.description,
        "task": {"id": _TASK_ID, "name": model.task, "description": "Generates text from a prompt or from messages."},
        "tags": [],
        "properties": properties,
    }


def _whole(asked: dict[str, str], name: str, default: int, most: int) -> int:
    text = asked.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise bad_input(f"'{name}' is a whole number from 1 to {most}", name)
    return int(text)
