"""Which list of models lies at which path below an account. It does not know who asks."""

from collections.abc import Callable, Sequence
from typing import Final

from gateway.catalogue.catalogue import Model
from gateway.http.exchange import JSON_CONTENT, Exchange
from gateway.listing import openai, schemas, workers_ai
from gateway.listing.context import ListingContext
from tenants.auth.caller import Caller

# Renders what the query asks of the models that the caller may use. Raises ApiError.
ListRenderer = Callable[[ListingContext, Sequence[Model], Exchange], bytes]

LISTS: Final[dict[str, ListRenderer]] = {
    "/models/search": workers_ai.search,
    "/models/schema": schemas.one,
    "/tasks/search": workers_ai.tasks,
    "/authors/search": workers_ai.authors,
    "/v1/models": openai.listed,
    "/v1/models/{model:path}": openai.one,
}


async def serve_list(context: ListingContext, render: ListRenderer, exchange: Exchange, caller: Caller) -> None:
    """Answers with a list of the models that the caller may use. Raises ApiError."""
    models = [model for model in context.catalogue if caller.grant.serves(model.name)]
    await exchange.answer(200, render(context, models, exchange), [JSON_CONTENT])
