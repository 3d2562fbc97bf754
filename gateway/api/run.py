"""The dialect of `/ai/run`: the model's catalogue entry names the family of its bodies, and the family reads them.

It knows the catalogue, and no fields of any family.
"""

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway import errors
from gateway.api.dialect import AnyRequest, Dialect
from gateway.api.run_batch import read_batch
from gateway.catalogue.catalogue import Catalogue
from gateway.http.json_body import decode_body


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

    def read(self, body: bytes, query: bytes, model: str | None, drawn_seed: int) -> AnyRequest:
        if model is None:
            request = decode_body(body, _decoder)
            model, body = request.model, bytes(request.input)
        entry = self._catalogue.find(model)
        if entry is None:
            raise errors.no_such_model(model)
        family = self._families[entry.run_family]
        return read_batch(body, query, model, family) or family.read(body, query, model, drawn_seed)
