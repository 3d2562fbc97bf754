"""The dialect of each path below an account that asks a model something.

It serves nothing, and does not know how paths name accounts.
"""

from dataclasses import dataclass

from gateway.api import embeddings, rerank
from gateway.api.chat import ChatDialect
from gateway.api.completions import CompletionsDialect
from gateway.api.dialect import Dialect
from gateway.api.messages_request import CountTokensDialect, MessagesDialect
from gateway.api.responses_request import InputTokensDialect, ResponsesDialect
from gateway.api.run import RunDialect
from gateway.api.run_chat import RunChatDialect
from gateway.api.run_native import RunNativeDialect
from gateway.catalogue.catalogue import Catalogue
from gateway.http.error_format import ErrorFormat


@dataclass(frozen=True, slots=True)
class DialectRoute:
    """`name` is the route's name in the metrics, `shape` the format of its errors."""

    name: str
    dialect: Dialect
    shape: ErrorFormat = ErrorFormat.OPENAI


def dialect_routes(catalogue: Catalogue) -> dict[str, DialectRoute]:
    """The routes by the path behind the account. `/run` is also the route of `/run/{model}`."""
    families: dict[str, Dialect] = {
        "native": RunNativeDialect(),
        "chat": RunChatDialect(),
        "embeddings": embeddings.RunEmbeddingsDialect(),
        "rerank": rerank.RunRerankDialect(),
    }
    return {
        "/run": DialectRoute("run", RunDialect(catalogue, families), ErrorFormat.ENVELOPE),
        "/v1/chat/completions": DialectRoute("chat", ChatDialect()),
        "/v1/completions": DialectRoute("completions", CompletionsDialect()),
        "/v1/embeddings": DialectRoute("embeddings", embeddings.EmbeddingsDialect()),
        "/v1/rerank": DialectRoute("rerank", rerank.RerankDialect()),
        "/v1/responses": DialectRoute("responses", ResponsesDialect()),
        "/v1/responses/input_tokens": DialectRoute("response_tokens", InputTokensDialect()),
        "/v1/messages": DialectRoute("messages", MessagesDialect(), ErrorFormat.ANTHROPIC),
        "/v1/messages/count_tokens": DialectRoute("message_tokens", CountTokensDialect(), ErrorFormat.ANTHROPIC),
    }
