"""The requests that dialects read bodies into, and what a dialect is. It knows no paths and no JSON."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from gateway.catalogue.catalogue import Model
from gateway.catalogue.tasks import ModelTask
from gateway.inference.embedding_types import EmbeddingRequest
from gateway.inference.prompt import SEED_BITS, Prompt
from gateway.inference.reply import Reply
from gateway.inference.run_options import RunOptionsBody


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A body that asks a model for text, and the answer that is to be written. `reply` takes the model's name, the
    request's id, the second since 1970 at which it arrived, and the paddings of its events."""

    model: str
    prompt: Prompt
    reply: Callable[[str, str, int, Iterator[bytes]], Reply]


@dataclass(frozen=True, slots=True)
class TokenCountRequest:
    """A body that asks only how many tokens the prompt has. The answer begins with `head`."""

    model: str
    prompt: Prompt
    head: dict[str, str] = field(default_factory=dict)

    def render(self, tokens: int) -> bytes:
        """The body of the answer."""
        return msgspec.json.encode({**self.head, "input_tokens": tokens})


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """Many requests for one model, each of which `dialect` reads."""

    model: str
    requests: list[msgspec.Raw]
    dialect: "Dialect"


@dataclass(frozen=True, slots=True)
class BatchResultsRequest:
    """A question for the state of a batch, or its results."""

    model: str
    request_id: str


LiveRequest = GenerationRequest | TokenCountRequest | EmbeddingRequest
AnyRequest = LiveRequest | BatchRequest | BatchResultsRequest
# Reads one family of request bodies: the body, the query string, the model that the path names if any, and the seed for
# a request that names none. Raises ApiError.
Dialect = Callable[[bytes, bytes, str | None, int], AnyRequest]


def draw_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(SEED_BITS)


def options_in_body(request: LiveRequest) -> RunOptionsBody | None:
    """What the body says of how the call is run, where it has a place for that."""
    return request.texts.options if isinstance(request, EmbeddingRequest) else request.prompt.options


def matches_task(model: Model, request: AnyRequest) -> bool:
    """Whether the model does what is asked."""
    if isinstance(request, BatchRequest | BatchResultsRequest):
        return True  # each request of a batch is read as the model's own bodies are
    if isinstance(request, GenerationRequest | TokenCountRequest):
        return model.task is ModelTask.GENERATION
    return model.task is ModelTask.EMBEDDINGS or (model.task is ModelTask.CLASSIFICATION and request.texts.scored)
