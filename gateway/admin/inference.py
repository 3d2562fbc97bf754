"""Describes the routes that ask a model something, for the OpenAPI document. It serves nothing.

tests/gateway/admin/test_openapi.py asks that each described route is served, and no other.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from gateway.admin.operation import ACCOUNT, NoFields
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
from gateway.inference.run_options import RunQuery
from gateway.listing import answers
from gateway.listing.answers import Enveloped
from tenants.records.grants import Permission

# 405: an adapter is asked for. 409: the Idempotency-Key is taken. 422: it belongs to another request; or this one was
# running in two crashes of its model. 429: a limit, or capacity taken.
_GENERATING: Final = (405, 409, 410, 413, 422, 429)
_COUNTING: Final = (409, 410, 413, 422, 429)
# Headers of every request that asks a model something.
_HEADERS: Final = ("Idempotency-Key", "x-session-affinity", "cf-aig-metadata", "cf-aig-request-timeout", "cf-aig-zdr")
AI: Final = (f"{ACCOUNT}/ai", "/ai")  # the prefixes of all routes below an account
V1: Final = (*AI, "")  # those of the routes below /v1


class RunQueueQuery(RunQuery, frozen=True):
    """With queueRequest the body is a batch, and the answer comes when there is capacity that nobody else wants."""

    queueRequest: Literal["true", "false", "1", "0"] = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedRoute:
    """`body`, `result` and `events` are one type, or several, one of which it is. Events come if the body asks for
    `stream`. `open`: anybody may ask, and sees more with the permissions if there are any. `plain` is the media type of
    an answer that is no JSON."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    permissions: tuple[Permission, ...] = (Permission.INFERENCE,)
    result: Any
    query: type[msgspec.Struct] = NoFields
    headers: tuple[str, ...] = ()
    body: Any = None
    statuses: tuple[int, ...] = ()
    events: Any = None
    open: bool = False
    plain: str | None = None


def _asks(
    prefixes: tuple[str, ...],
    resource: str,
    summary: str,
    body: Any,
    result: Any,
    events: Any = None,
    *,
    query: type[RunQuery] = RunQuery,
    statuses: tuple[int, ...] = _GENERATING,
) -> tuple[DescribedRoute, ...]:
    """Repeats one route under several prefixes."""
    return tuple(
        DescribedRoute(
            method="POST",
            path=f"{prefix}{resource}",
            summary=summary,
            body=body,
            result=result,
            events=events,
            query=query,
            headers=_HEADERS,
            statuses=statuses,
        )
        for prefix in prefixes
    )


_RUN_BODIES: Final = (
    run_native.RunNativeBody,
    run_chat.RunChatBody,
    embeddings.RunEmbeddingsBody,
    rerank.RunRerankBody,
    BatchInput,
    ResultsInput,
)
_RUN: Final = (
    Enveloped[answers.Generated],
    Enveloped[answers.ChatCompletion],
    Enveloped[answers.TextCompletion],
    Enveloped[answers.Vectors],
    Enveloped[answers.Scores],
    Enveloped[answers.BatchState],
    Enveloped[answers.BatchResults],
)
_RUN_EVENTS: Final = (answers.NativeEvent, answers.ChatChunk, answers.TextCompletion)
_RUN_SUMMARY: Final = (
    "Generate text, natively; with queueRequest many at leisure, and a batch's results by its request_id"
)
_RERANK_SUMMARY: Final = "How well documents answer a query, as Jina and Cohere ask for it"
_INPUT_TOKENS_SUMMARY: Final = "How many tokens a response's input has; a request for the limits, and no tokens"
_COUNT_TOKENS_SUMMARY: Final = "How many tokens the messages have; a request for the limits, and no tokens"

INFERENCE: Final = (
    *_asks(AI, "/run/{model}", _RUN_SUMMARY, _RUN_BODIES, _RUN, _RUN_EVENTS, query=RunQueueQuery),
    *_asks(AI, "/run", "The same, with the model in the body", run.RunBody, _RUN, _RUN_EVENTS),
    *_asks(
        V1,
        "/v1/chat/completions",
        "OpenAI's chat completions",
        chat.ChatBody,
        answers.ChatCompletion,
        answers.ChatChunk,
    ),
    *_asks(
        V1,
        "/v1/completions",
        "OpenAI's completions of a text",
        completions.CompletionsBody,
        answers.TextCompletion,
        answers.TextCompletion,
    ),
    *_asks(
        V1,
        "/v1/embeddings",
        "OpenAI's embeddings: a vector for each text",
        embeddings.EmbeddingsBody,
        answers.Embeddings,
    ),
    *_asks(V1, "/v1/rerank", _RERANK_SUMMARY, rerank.RerankBody, answers.Ranking),
    *_asks(
        V1,
        "/v1/responses",
        "OpenAI's Responses, of which nothing is stored",
        responses_request.ResponsesBody,
        answers.Response,
        answers.ResponseEvent,
    ),
    *_asks(
        V1,
        "/v1/responses/input_tokens",
        _INPUT_TOKENS_SUMMARY,
        responses_request.InputTokensBody,
        answers.ResponseTokens,
        statuses=_COUNTING,
    ),
    *_asks(
        V1,
        "/v1/messages",
        "Anthropic's Messages",
        messages_request.MessagesBody,
        answers.AnthropicMessage,
        answers.AnthropicEvent,
    ),
    *_asks(
        V1,
        "/v1/messages/count_tokens",
        _COUNT_TOKENS_SUMMARY,
        messages_request.CountTokensBody,
        answers.AnthropicTokens,
        statuses=_COUNTING,
    ),
)
