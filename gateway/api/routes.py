"""The dialect of each path below an account that asks a model something; that of `/ai/run` is the model's own.

It serves nothing, and does not know how paths name accounts, nor what bodies have beside the model that one names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.api.chat import read_chat, read_run_chat
from gateway.api.completions import read_completions
from gateway.api.dialect import AnyRequest, Dialect
from gateway.api.embeddings import read_embeddings, read_run_embeddings
from gateway.api.messages_request import read_count_tokens, read_messages
from gateway.api.rerank import read_rerank, read_run_rerank
from gateway.api.responses_request import read_input_tokens, read_responses
from gateway.api.run_batch import read_batch
from gateway.api.run_native import read_run_native
from gateway.catalogue.catalogue import Catalogue
from gateway.http.error_format import ErrorFormat
from gateway.http.json_body import decode_body
from gateway.http.unknown_fields import UnknownField

# By the catalogue's word for the family of a model's bodies.
RUN_FAMILIES: Final[Mapping[str, Dialect]] = {
    "native": read_run_native,
    "chat": read_run_chat,
    "embeddings": read_run_embeddings,
    "rerank": read_run_rerank,
}


@dataclass(frozen=True, slots=True)
class DialectRoute:
    """`name` is the route's name in the metrics, `shape` the format of its errors."""

    name: str
    dialect: Dialect
    shape: ErrorFormat = ErrorFormat.OPENAI


def dialect_routes(catalogue: Catalogue) -> dict[str, DialectRoute]:
    """The routes by the path behind the account. `/run` is also the route of `/run/{model}`."""
    return {
        "/run": DialectRoute("run", partial(read_run, catalogue), ErrorFormat.ENVELOPE),
        "/v1/chat/completions": DialectRoute("chat", read_chat),
        "/v1/completions": DialectRoute("completions", read_completions),
        "/v1/embeddings": DialectRoute("embeddings", read_embeddings),
        "/v1/rerank": DialectRoute("rerank", read_rerank),
        "/v1/responses": DialectRoute("responses", read_responses),
        "/v1/responses/input_tokens": DialectRoute("response_tokens", read_input_tokens),
        "/v1/messages": DialectRoute("messages", read_messages, ErrorFormat.ANTHROPIC),
        "/v1/messages/count_tokens": DialectRoute("message_tokens", read_count_tokens, ErrorFormat.ANTHROPIC),
    }


class RunBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/ai/run` where the path names no model; `input` is what the model's own path takes."""

    model: Annotated[str, Meta(max_length=512)]
    input: msgspec.Raw


_decoder: Final = msgspec.json.Decoder(RunBody)


def read_run(catalogue: Catalogue, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> AnyRequest:
    """The dialect of `/ai/run/{model}` and `/ai/run`: the model's catalogue entry names the family that reads it.
    Raises ApiError and UnknownModel."""
    if model is None:
        request = decode_body(body, _decoder)
        try:
            return read_run(catalogue, bytes(request.input), query, request.model, drawn_seed)
        except UnknownField as unknown:
            raise unknown.inside("input") from None
    family = RUN_FAMILIES[catalogue.get(model).run_family]
    return read_batch(body, query, model, family) or family(body, query, model, drawn_seed)
