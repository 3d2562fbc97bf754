"""The routes below an account, whether the path names the account or the token does. It knows no bodies."""

from functools import partial

from starlette.routing import BaseRoute, Mount, Route, Router

from gateway.api.dialect import Dialect
from gateway.api.endpoint import InferenceEndpoint
from gateway.api.routes import dialect_routes
from gateway.authentication import Authenticator, CallerHandler, no_route_below_account
from gateway.batch.api import BatchApi
from gateway.http.error_format import ErrorFormat
from gateway.http.exchange import Exchange
from gateway.http.routes import Endpoint, ExchangeServer, Handler, by_method
from gateway.listing.context import ListingContext
from gateway.listing.table import LISTS, serve_list
from gateway.open_requests import OpenRequest, OpenRequests
from gateway.serving import Serving
from tenants.auth.caller import Caller
from tenants.records.grants import Permission


def account_routes(
    server: ExchangeServer, authenticator: Authenticator, requests: OpenRequests, serving: Serving
) -> list[BaseRoute]:
    """Builds the routes below `/client/v4/accounts/{account_id}/ai` and `/ai`; those of `/v1` also stand alone."""

    def route(path: str, handler: Handler, error_format: ErrorFormat | None = None) -> Route:
        error_format = error_format or (ErrorFormat.OPENAI if path.startswith("/v1/") else ErrorFormat.ENVELOPE)
        return Route(path, Endpoint(server, handler, error_format))

    def permitted(serve: CallerHandler) -> Handler:
        return authenticator.permitted(serve, Permission.INFERENCE)

    endpoint = serving.endpoint
    dialects = dialect_routes(endpoint.catalogue)
    run = dialects["/run"]
    run_model = _inference(endpoint, requests, run.name, run.dialect)
    below = [route("/run/", no_route_below_account), route("/run/{model:path}", run_model)]
    for path, each in dialects.items():
        below.append(route(path, _inference(endpoint, requests, each.name, each.dialect), each.shape))
    batch = permitted(partial(_batch, serving.batches))
    below += [
        route("/batches", by_method("batches", GET=permitted(serving.batches.list_batches))),
        route("/batches/{request_id:path}", by_method("batch", GET=batch, DELETE=batch)),
        route("/v1/models/", no_route_below_account),
    ]
    context = serving.context
    listing = ListingContext(endpoint.catalogue, context.fleet, context.limits.neuron_usd, endpoint.calendar)
    for path, render in LISTS.items():
        below.append(route(path, by_method("models", GET=permitted(partial(serve_list, listing, render)))))
    v1 = [*(each for each in below if each.path.startswith("/v1/")), route("/v1/{path:path}", no_route_below_account)]
    ai = Router([*below, v1[-1]], redirect_slashes=False, default=Endpoint(server, no_route_below_account))
    return [Mount("/client/v4/accounts/{account_id}/ai", ai), Mount("/ai", ai), *v1]


def _inference(endpoint: InferenceEndpoint, requests: OpenRequests, name: str, dialect: Dialect) -> Handler:
    """Serves calls of a model, which the path names or the body."""

    async def serve(request: OpenRequest) -> None:
        await endpoint.serve(request, dialect, request.exchange.path_params.get("model"))

    return by_method(name, POST=requests.handler(serve))


async def _batch(batches: BatchApi, exchange: Exchange, caller: Caller) -> None:
    await batches.get_or_cancel(exchange, caller, exchange.path_params["request_id"])
