"""What the OpenAPI document says of the routes that app.py serves itself: inference, the catalogue, and its own health.

It serves nothing; tests/gateway/admin/test_openapi.py asks that each of these is served, and no other.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from gateway.admin.operation import ACCOUNT, BASE
from gateway.api import (
    chat,
    completions,
    embeddings,
    messages_request,
    rerank,
    responses_request,
    run,
    run_chat,
    run_native,
)
from gateway.api.run_batch import BatchInput, ResultsInput
from gateway.batch.api import BatchesQuery, BatchItem
from gateway.inference.run_options import RunQuery
from gateway.listing.answers import (
    AnthropicEvent,
    AnthropicMessage,
    AnthropicTokens,
    BatchResults,
    BatchState,
    ChatChunk,
    ChatCompletion,
    Embeddings,
    Enveloped,
    Generated,
    NativeEvent,
    Ranking,
    Response,
    ResponseEvent,
    ResponseTokens,
    Scores,
    TextCompletion,
    Vectors,
)
from gateway.listing.openai import ModelCard, ModelCards, ModelsQuery
from gateway.listing.openrouter import Offers
from gateway.listing.pages import Listed
from gateway.listing.schemas import SchemaQuery, Schemas
from gateway.listing.workers_ai import Author, ModelItem, NoQuery, SearchQuery, Task
from tenants.auth.accounts import Permission

INFERENCE: Final = (Permission.INFERENCE,)
# 405: an adapter is asked for. 409: the Idempotency-Key is taken. 422: it is another request's; or this one was running
# in two crashes of its model. 429: a limit, or capacity taken.
_GENERATING: Final = (405, 409, 410, 413, 422, 429)
_COUNTING: Final = (409, 410, 413, 422, 429)
# What may be said beside the body of whatever asks a model something.
_BESIDE: Final = ("Idempotency-Key", "x-session-affinity", "cf-aig-metadata", "cf-aig-request-timeout", "cf-aig-zdr")


class RunQueueQuery(RunQuery, frozen=True):
    """With queueRequest the body is a batch, and the answer comes when there is capacity that nobody else wants."""

    queueRequest: Literal["true", "false", "1", "0"] = "false"


class Alive(msgspec.Struct):
    alive: bool


class Ready(msgspec.Struct):
    ready: bool
    problems: list[str]


@dataclass(frozen=True, slots=True)
class InferenceRoute:
    """`body`, `result` and `events` are one type, or several, one of which it is. Events come where the body asks for
    `stream`. `open`: anybody may ask, and sees more with the permissions where there are
    any. `plain` is the media type of an answer that is no JSON."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    permissions: tuple[Permission, ...]
    result: Any
    query: type[msgspec.Struct] = NoQuery
    headers: tuple[str, ...] = ()
    body: Any = None
    statuses: tuple[int, ...] = ()
    events: Any = None
    open: bool = False
    plain: str | None = None


def _below(
    method: Literal["GET", "POST", "DELETE"], places: tuple[str, ...], resource: str, **said: Any
) -> tuple[InferenceRoute, ...]:
    """The same under several paths. What is posted asks a model something."""
    if method == "POST":
        said = {"query": RunQuery, "headers": _BESIDE, **said}
    return tuple(InferenceRoute(method, f"{place}{resource}", **said) for place in places)


_RUN: Final = (
    Enveloped[Generated],
    Enveloped[ChatCompletion],
    Enveloped[TextCompletion],
    Enveloped[Vectors],
    Enveloped[Scores],
    Enveloped[BatchState],
    Enveloped[BatchResults],
)
_RUN_EVENTS: Final = (NativeEvent, ChatChunk, TextCompletion)
_AI: Final = (f"{ACCOUNT}/ai", "/ai")

ROUTES: Final = (
    *_below(
        "POST",
        _AI,
        "/run/{model}",
        summary="Generate text, natively; with queueRequest many at leisure, and a batch's results by its request_id",
        permissions=INFERENCE,
        result=_RUN,
        query=RunQueueQuery,
        body=(
            run_native.RunNativeBody,
            run_chat.RunChatBody,
            embeddings.RunEmbeddingsBody,
            rerank.RunRerankBody,
            BatchInput,
            ResultsInput,
        ),
        statuses=_GENERATING,
        events=_RUN_EVENTS,
    ),
    *_below(
        "POST",
        _AI,
        "/run",
        summary="The same, with the model in the body",
        permissions=INFERENCE,
        result=_RUN,
        body=run.RunBody,
        statuses=_GENERATING,
        events=_RUN_EVENTS,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/chat/completions",
        summary="OpenAI's chat completions",
        permissions=INFERENCE,
        result=ChatCompletion,
        body=chat.ChatBody,
        statuses=_GENERATING,
        events=ChatChunk,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/completions",
        summary="OpenAI's completions of a text",
        permissions=INFERENCE,
        result=TextCompletion,
        body=completions.CompletionsBody,
        statuses=_GENERATING,
        events=TextCompletion,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/embeddings",
        summary="OpenAI's embeddings: a vector for each text",
        permissions=INFERENCE,
        result=Embeddings,
        body=embeddings.EmbeddingsBody,
        statuses=_GENERATING,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/rerank",
        summary="How well documents answer a query, as Jina and Cohere ask for it",
        permissions=INFERENCE,
        result=Ranking,
        body=rerank.RerankBody,
        statuses=_GENERATING,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/responses",
        summary="OpenAI's Responses, of which nothing is stored",
        permissions=INFERENCE,
        result=Response,
        body=responses_request.ResponsesBody,
        statuses=_GENERATING,
        events=ResponseEvent,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/responses/input_tokens",
        summary="How many tokens a response's input has; a request for the limits, and no tokens",
        permissions=INFERENCE,
        result=ResponseTokens,
        body=responses_request.InputTokensBody,
        statuses=_COUNTING,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/messages",
        summary="Anthropic's Messages",
        permissions=INFERENCE,
        result=AnthropicMessage,
        body=messages_request.MessagesBody,
        statuses=_GENERATING,
        events=AnthropicEvent,
    ),
    *_below(
        "POST",
        (*_AI, ""),
        "/v1/messages/count_tokens",
        summary="How many tokens the messages have; a request for the limits, and no tokens",
        permissions=INFERENCE,
        result=AnthropicTokens,
        body=messages_request.CountTokensBody,
        statuses=_COUNTING,
    ),
    *_below(
        "GET",
        _AI,
        "/batches",
        summary="The account's batches, the newest first, until their results are deleted",
        permissions=INFERENCE,
        result=Enveloped[list[BatchItem]],
        query=BatchesQuery,
    ),
    *_below(
        "GET",
        _AI,
        "/batches/{request_id}",
        summary="How far a batch is",
        permissions=INFERENCE,
        result=Enveloped[BatchItem],
    ),
    *_below(
        "DELETE",
        _AI,
        "/batches/{request_id}",
        summary="Cancel what has not ended of a batch; what has stays",
        permissions=INFERENCE,
        result=Enveloped[BatchItem],
    ),
    *_below(
        "GET",
        _AI,
        "/models/search",
        summary="The models that the token may call, also as OpenRouter asks for them",
        permissions=INFERENCE,
        result=(Listed[ModelItem], Offers),
        query=SearchQuery,
    ),
    *_below(
        "GET",
        _AI,
        "/models/schema",
        summary="JSON Schemas of what a model takes and answers at /ai/run",
        permissions=INFERENCE,
        result=Schemas,
        query=SchemaQuery,
    ),
    *_below(
        "GET",
        _AI,
        "/tasks/search",
        summary="What the models do",
        permissions=INFERENCE,
        result=Listed[Task],
    ),
    *_below(
        "GET",
        _AI,
        "/authors/search",
        summary="Who the models are from",
        permissions=INFERENCE,
        result=Listed[Author],
    ),
    *_below(
        "GET",
        (*_AI, ""),
        "/v1/models",
        summary="OpenAI's and Anthropic's list of the models that the token may call",
        permissions=INFERENCE,
        result=ModelCards,
        query=ModelsQuery,
    ),
    *_below(
        "GET",
        (*_AI, ""),
        "/v1/models/{model}",
        summary="One of them",
        permissions=INFERENCE,
        result=ModelCard,
    ),
    InferenceRoute("GET", "/healthz", "Whether the process lives", (), Alive, open=True),
    InferenceRoute("GET", "/readyz", "Whether it can serve, and why not", (), Ready, open=True),
    InferenceRoute(
        "GET",
        "/metrics",
        "Prometheus text, for networks that may read it; with the operator's token also by account and plan",
        (Permission.OPERATOR,),
        str,
        statuses=(404,),
        open=True,
        plain="text/plain",
    ),
    InferenceRoute("GET", f"{BASE}/openapi.json", "This document", (), dict[str, Any], open=True),
)
