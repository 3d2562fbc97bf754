"""Reads a body with its dialect, and finds the model that it asks: before anything is reserved or run.

It does not know what a model is asked to do.
"""

from functools import partial

from gateway import errors
from gateway.admission import check_model
from gateway.api.dialect import AnyRequest, Dialect, draw_seed, matches_task
from gateway.catalogue.catalogue import Catalogue, Model, UnknownModel
from gateway.http.error_format import ErrorFormat
from gateway.http.json_body import body_without
from gateway.http.unknown_fields import IGNORED_FIELDS_MAX, UnknownField
from gateway.inference.context import InferenceContext
from gateway.open_requests import OpenRequest


async def read_call(
    context: InferenceContext,
    catalogue: Catalogue,
    now: float,
    request: OpenRequest,
    body: bytes,
    dialect: Dialect,
    model_name: str | None,
) -> tuple[AnyRequest, Model]:
    """What the body asks, and the model; `model_name` is the one that the path names, if any. Raises ApiError, also
    where the caller may not have the model do this."""
    caller = request.caller
    try:
        asked = await _read(context, request, body, dialect, model_name)
        model = catalogue.get(asked.model)
    except UnknownModel as unknown:
        native = request.exchange.error_format is ErrorFormat.ENVELOPE
        absent = errors.no_such_model if native else errors.no_model_of_name
        raise absent(unknown.name, catalogue.did_you_mean(unknown.name, caller.grant.serves)) from None
    check_model(context.limits.region, now, caller, model, asked.model)
    if not matches_task(model, asked):
        raise errors.wrong_task(model.name, model.task)
    return asked, model


async def _read(
    context: InferenceContext, request: OpenRequest, body: bytes, dialect: Dialect, model_name: str | None
) -> AnyRequest:
    """What the body asks. Where the server ignores unknown fields, it is read once more without each of them, and a
    header of the answer names them."""
    exchange, account_id = request.exchange, request.caller.account.id
    parse, ignored = context.account_locks.parse, dict[str, None]()
    while True:
        read = partial(dialect, body, exchange.query, model_name, draw_seed())
        try:
            asked = await parse(account_id, len(body), read)
        except UnknownField as unknown:
            refused = context.limits.unknown_fields == "refuse" or len(ignored) == IGNORED_FIELDS_MAX
            if refused or unknown.place is None:
                raise
            body = await parse(account_id, len(body), partial(body_without, unknown, body))
            ignored[unknown.pattern] = None
        else:
            if ignored:
                exchange.extra_headers.append((b"x-ignored-fields", ", ".join(ignored).encode()))
            return asked
