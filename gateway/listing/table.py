"""Which list lies at which path below an account."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from gateway.catalogue.catalogue import Model
from gateway.inference.request import InferenceContext
from gateway.listing import openai, schemas, workers_ai

# Writes what the query asks of the models that the caller may use. Raises Refusal.
ListRenderer = Callable[[InferenceContext, Sequence[Model], bytes], bytes]

_ONE: Final = "/v1/models/"
_LISTS: Final[dict[str, ListRenderer]] = {
    "/models/search": workers_ai.search,
    "/models/schema": schemas.one,
    "/tasks/search": workers_ai.tasks,
    "/authors/search": workers_ai.authors,
    "/v1/models": openai.listed,
}


def find_list(resource: str) -> ListRenderer | None:
    if resource.startswith(_ONE) and resource != _ONE:
        return partial(openai.one, name=resource.removeprefix(_ONE))
    return _LISTS.get(resource)
