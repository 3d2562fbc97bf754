"""The catalogue as OpenAI's and Anthropic's clients list it. Both ask at the same path, so that each model and the list
have the fields of both; what one of them does not know it passes over.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.body import asked_in
from gateway.catalogue import Model
from gateway.listing.models import NoQuery
from gateway.request import Gateway

LIMIT_MAX: Final = 1000


class ModelsQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Anthropic's way of paging: names of models, behind or before which the page lies. OpenAI's has no pages."""

    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = LIMIT_MAX
    after_id: str = ""
    before_id: str = ""


def listed(gateway: Gateway, models: Sequence[Model], query: bytes) -> bytes:
    """`/v1/models`: each under its name and its aliases. Raises Refusal."""
    asked = asked_in(query, ModelsQuery)
    today = datetime.fromtimestamp(gateway.calendar(), UTC).date()
    named = {name: model for model in models if not model.ended(today) for name in (model.name, *model.aliases)}
    names = _between(list(named), asked)
    shown = names[-asked.limit :] if asked.before_id else names[: asked.limit]
    body = {
        "object": "list",
        "data": [_item(name, named[name]) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
    return msgspec.json.encode(body)


def one(gateway: Gateway, models: Sequence[Model], query: bytes, name: str) -> bytes:
    """`/v1/models/{model}`. Raises Refusal."""
    asked_in(query, NoQuery)
    found = next((model for model in models if name in (model.name, *model.aliases)), None)
    if found is None:
        raise errors.no_model_of_name(name)
    return msgspec.json.encode(_item(name, found))


def _between(names: list[str], asked: ModelsQuery) -> list[str]:
    """What lies behind `after_id` and before `before_id`. Raises Refusal for names that are not in the list."""
    for field in ("after_id", "before_id"):
        if (id := getattr(asked, field)) and id not in names:
            raise errors.bad_input(f"'{field}' is none of the models in this list", field)
    start = names.index(asked.after_id) + 1 if asked.after_id else 0
    end = names.index(asked.before_id) if asked.before_id else len(names)
    return names[start:end]


def _item(name: str, model: Model) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": model.author,
        "type": "model",
        "display_name": name.rpartition("/")[2],
        "created_at": datetime.fromtimestamp(int(model.created_at), UTC).isoformat(),
    }
