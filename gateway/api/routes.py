"""Which dialect reads the bodies of which path: one line for each path below an account that asks a model something.

It serves nothing, and does not know how accounts stand in paths.
"""

from dataclasses import dataclass

from gateway.api import embeddings, rerank
from gateway.api.chat import Chat
from gateway.api.completions import Completions
from gateway.api.messages_request import CountTokens, Messages
from gateway.api.responses_request import InputTokens, Responses
from gateway.api.run import Run
from gateway.api.run_chat import ChatRun
from gateway.api.run_native import Native
from gateway.catalogue.catalogue import Catalogue
from gateway.errors import Shape
from gateway.inference.reply import Dialect


@dataclass(frozen=True, slots=True)
class Route:
    """`name` is the route's in the metrics, `shape` that of its errors."""

    name: str
    dialect: Dialect
    shape: Shape = Shape.OPENAI


def routes(catalogue: Catalogue) -> dict[str, Route]:
    """By the path behind the account. `/run` is also that of `/run/{model}`."""
    families: dict[str, Dialect] = {
        "native": Native(),
        "chat": ChatRun(),
        "embeddings": embeddings.Native(),
        "rerank": rerank.Native(),
    }
    return {
        "/run": Route("run", Run(catalogue, families), Shape.ENVELOPE),
        "/v1/chat/completions": Route("chat", Chat()),
        "/v1/completions": Route("completions", Completions()),
        "/v1/embeddings": Route("embeddings", embeddings.OpenAI()),
        "/v1/rerank": Route("rerank", rerank.Rerank()),
        "/v1/responses": Route("responses", Responses()),
        "/v1/responses/input_tokens": Route("response_tokens", InputTokens()),
        "/v1/messages": Route("messages", Messages(), Shape.ANTHROPIC),
        "/v1/messages/count_tokens": Route("message_tokens", CountTokens(), Shape.ANTHROPIC),
    }
