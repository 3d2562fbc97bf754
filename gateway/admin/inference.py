"""Describes the routes that ask a model something, for the OpenAPI document. It serves nothing.

tests/gateway/admin/test_openapi.py asks that each described route is served, and no other.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal

import msgspec

from gateway.admin.operation import ACCOUNT, NoFields
from gateway.api.chat import ChatBody, RunChatBody
from gateway.api.completions import CompletionsBody
from gateway.api.embeddings import EmbeddingsBody, RunEmbeddingsBody
from gateway.api.messages_request import CountTokensBody, MessagesBody
from gateway.api.rerank import RerankBody, RunRerankBody
from gateway.api.responses_request import InputTokensBody, ResponsesBody
from gateway.api.routes import RunBody
from gateway.api.run_batch import BatchInput, ResultsInput
from gateway.api.run_native import RunNativeBody
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
V1: Final = (*(f"{prefix}/v1" for prefix in AI), "/v1")


class RunQueueQuery(RunQuery, frozen=True):
    """With queueRequest the body is a batch, and the answer comes when there is capacity that nobody else wants."""

    queueRequest: Literal["true", "false", "1", "0"] = "false"


@dataclass(frozen=True, slots=True)
class DescribedRoute:
    """`body`, `result` and `events` are one type, or several, one of which it is. Events come if the body asks for
    `stream`. `open`: anybody may ask, and sees more with the permissions if there are any. `plain` is the media type of
    an answer that is no JSON."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    result: Any
    permissions: tuple[Permission, ...] = (Permission.INFERENCE,)
    _: KW_ONLY
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
) -> list[DescribedRoute]:
    """One route that asks a model something, under several prefixes."""
    return [
        DescribedRoute(
            "POST", f"{prefix}{resource}", summary, result,
            query=query, headers=_HEADERS, body=body, events=events,
            statuses=(*statuses, 404) if prefixes is V1 else statuses,  # no such model
        )
        for prefix in prefixes
    ]  # fmt: skip


_RUN_BODIES: Final = (RunNativeBody, RunChatBody, RunEmbeddingsBody, RunRerankBody, BatchInput, ResultsInput)
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
_COMPLETIONS_SUMMARY: Final = "OpenAI's completions of a text"
_RESPONSES_SUMMARY: Final = "OpenAI's Responses, of which nothing is stored"
_RERANK_SUMMARY: Final = "How well documents answer a query, as Jina and Cohere ask for it"
_INPUT_SUMMARY: Final = "How many tokens a response's input has; a request for the limits, and no tokens"
_COUNT_SUMMARY: Final = "How many tokens the messages have; a request for the limits, and no tokens"
INFERENCE: Final = (
    *_asks(AI, "/run/{model}", _RUN_SUMMARY, _RUN_BODIES, _RUN, _RUN_EVENTS, query=RunQueueQuery),
    *_asks(AI, "/run", "The same, with the model in the body", RunBody, _RUN, _RUN_EVENTS),
    *_asks(V1, "/chat/completions", "OpenAI's chat completions", ChatBody, answers.ChatCompletion, answers.ChatChunk),
    *_asks(V1, "/completions", _COMPLETIONS_SUMMARY, CompletionsBody, answers.TextCompletion, answers.TextCompletion),
    *_asks(V1, "/embeddings", "OpenAI's embeddings: a vector for each text", EmbeddingsBody, answers.Embeddings),
    *_asks(V1, "/rerank", _RERANK_SUMMARY, RerankBody, answers.Ranking),
    *_asks(V1, "/responses", _RESPONSES_SUMMARY, ResponsesBody, answers.Response, answers.ResponseEvent),
    *_asks(V1, "/responses/input_tokens", _INPUT_SUMMARY, InputTokensBody, answers.ResponseTokens, statuses=_COUNTING),
    *_asks(V1, "/messages", "Anthropic's Messages", MessagesBody, answers.AnthropicMessage, answers.AnthropicEvent),
    *_asks(V1, "/messages/count_tokens", _COUNT_SUMMARY, CountTokensBody, answers.AnthropicTokens, statuses=_COUNTING),
)
