"""The dialect of `/ai/run`: the model's catalogue entry says in which family its bodies are, and the family reads them.

It knows the catalogue, and nothing of what the families say.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.api import run_batch as batch
from gateway.api.run_batch import BatchRequest, BatchResultsRequest
from gateway.catalogue.catalogue import Catalogue
from gateway.http.json_body import decode_body
from gateway.inference.embedding_types import EmbeddingRequest
from gateway.inference.reply import Dialect, GenerationRequest, TokenCountRequest


class RunBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `/ai/run` where the path names no model; `input` is what the model's own path takes."""

    model: Annotated[str, Meta(max_length=512)]
    input: msgspec.Raw


_decoder: Final = msgspec.json.Decoder(RunBody)


class RunDialect:
    """The dialect of `/ai/run/{model}` and `/ai/run`. `families` are dialects by the catalogue's word for them."""

    def __init__(self, catalogue: Catalogue, families: Mapping[str, Dialect]) -> None:
        self._catalogue = catalogue
        self._families = families

    def read(
        self, body: bytes, query: bytes, model: str | None, drawn_seed: int
    ) -> GenerationRequest | TokenCountRequest | EmbeddingRequest | BatchRequest | BatchResultsRequest:
        if model is None:
            asked = decode_body(body, _decoder)
            model, body = asked.model, bytes(asked.input)
        found = self._catalogue.find(model)
        if found is None:
            raise errors.no_such_model(model)
        family = self._families[found.family]
        return batch.read_batch(body, query, model, family) or family.read(body, query, model, drawn_seed)
