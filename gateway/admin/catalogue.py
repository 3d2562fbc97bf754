"""Describes batches, lists of models, probes and the OpenAPI document itself. It serves nothing."""

from typing import Any, Final, Literal

import msgspec

from gateway.admin.inference import AI, V1, DescribedRoute
from gateway.admin.operation import BASE, NoFields
from gateway.batch.api import BatchesQuery, BatchItem
from gateway.listing.answers import Enveloped
from gateway.listing.openai import ModelCard, ModelCards, ModelsQuery
from gateway.listing.openrouter import Offers
from gateway.listing.pages import Listed
from gateway.listing.schemas import SchemaQuery, Schemas
from gateway.listing.workers_ai import Author, ModelItem, SearchQuery, Task
from tenants.records.grants import BEYOND_ACCOUNT


class Alive(msgspec.Struct):
    alive: bool


class Running(msgspec.Struct):
    """`protocol` is that of gateways, machines and replicas: they talk where it is the same."""

    name: str
    version: str
    protocol: int


class Ready(msgspec.Struct):
    ready: bool
    problems: list[str]


def _reads(
    prefixes: tuple[str, ...],
    resource: str,
    summary: str,
    result: Any,
    query: type[msgspec.Struct] = NoFields,
    method: Literal["GET", "DELETE"] = "GET",
) -> list[DescribedRoute]:
    """One route without a body, under several prefixes."""
    return [DescribedRoute(method, f"{prefix}{resource}", summary, result, query=query) for prefix in prefixes]


_BATCHES_SUMMARY: Final = "The account's batches, the newest first, until their results are deleted"
_CANCEL_SUMMARY: Final = "Cancel what has not ended of a batch; what has stays"
_SEARCH_SUMMARY: Final = "The models that the token may call, also as OpenRouter asks for them"
_SCHEMA_SUMMARY: Final = "JSON Schemas of what a model takes and answers at /ai/run"
_MODELS_SUMMARY: Final = "OpenAI's and Anthropic's list of the models that the token may call"
_METRICS_SUMMARY: Final = (
    "Prometheus text, for networks that may read it; with one of these permissions also by account and plan"
)

CATALOGUE: Final = (
    *_reads(AI, "/batches", _BATCHES_SUMMARY, Enveloped[list[BatchItem]], BatchesQuery),
    *_reads(AI, "/batches/{request_id}", "How far a batch is", Enveloped[BatchItem]),
    *_reads(AI, "/batches/{request_id}", _CANCEL_SUMMARY, Enveloped[BatchItem], method="DELETE"),
    *_reads(AI, "/models/search", _SEARCH_SUMMARY, (Listed[ModelItem], Offers), SearchQuery),
    *_reads(AI, "/models/schema", _SCHEMA_SUMMARY, Schemas, SchemaQuery),
    *_reads(AI, "/tasks/search", "What the models do", Listed[Task]),
    *_reads(AI, "/authors/search", "Who the models are from", Listed[Author]),
    *_reads(V1, "/models", _MODELS_SUMMARY, ModelCards, ModelsQuery),
    *_reads(V1, "/models/{model}", "One of them", ModelCard),
    DescribedRoute("GET", "/healthz", "Whether the process lives", Alive, (), open=True),
    DescribedRoute("GET", "/health", "The same", Alive, (), open=True),
    DescribedRoute("GET", "/version", "What runs here", Running, (), open=True),
    DescribedRoute("GET", "/readyz", "Whether it can serve, and why not", Ready, (), open=True),
    DescribedRoute(
        "GET", "/metrics", _METRICS_SUMMARY, str, BEYOND_ACCOUNT, statuses=(404,), open=True, plain="text/plain"
    ),
    DescribedRoute("GET", f"{BASE}/openapi.json", "This document", dict[str, Any], (), open=True),
    DescribedRoute("GET", "/docs", "This document for people", str, (), open=True, plain="text/html"),
)
