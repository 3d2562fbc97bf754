"""Bodies of `/ai/run` about batches: many requests for one model, or the id under which their results are asked for.

It splits a batch and checks one request of it at a time, with the dialect of the model's own bodies. It stores nothing.
"""

import re
from dataclasses import replace
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.api.dialect import (
    AnyRequest,
    BatchRequest,
    BatchResultsRequest,
    Dialect,
    GenerationRequest,
    options_in_body,
)
from gateway.errors import ApiError, bad_input
from gateway.http.json_body import decode_body, malformed, query_options
from gateway.inference.embedding_types import EmbeddingRequest
from tenants.records.batches import BATCH_BYTES_MAX, BATCH_ITEMS_MAX, ITEM_BYTES_MAX

REFERENCE_MAX: Final = 512
_POLL_BYTES_MAX: Final = 256
_ASKS_RESULTS: Final = re.compile(rb'\s*\{\s*"request_id"\s*:')


_Request = Annotated[
    msgspec.Raw,
    Meta(extra_json_schema={"type": "object", "properties": {"external_reference": {"type": ["string", "null"]}}}),
]


class BatchInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a batch; each of `requests` is what the model takes, and may have an `external_reference`."""

    requests: Annotated[list[_Request], Meta(min_length=1, max_length=BATCH_ITEMS_MAX)]


class ResultsInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body that asks for a batch's state, or its results."""

    request_id: Annotated[str, Meta(max_length=64)]


_batches: Final = msgspec.json.Decoder(BatchInput)
_results: Final = msgspec.json.Decoder(ResultsInput)
_requests: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_references: Final[msgspec.json.Decoder[str | None]] = msgspec.json.Decoder(
    Annotated[str, Meta(max_length=REFERENCE_MAX)] | None
)


def read_batch(body: bytes, query: bytes, model: str, dialect: Dialect) -> BatchRequest | BatchResultsRequest | None:
    """The body's batch, or the question for one; None where it is neither. Raises ApiError."""
    if len(body) <= _POLL_BYTES_MAX and _ASKS_RESULTS.match(body):
        return BatchResultsRequest(model, decode_body(body, _results).request_id)
    queued = query_options(query).get("queueRequest", "") if query else ""
    if queued in ("", "false", "0"):
        return None
    if queued not in ("true", "1"):
        raise bad_input("the option 'queueRequest' is true or false", "queueRequest")
    if len(body) > BATCH_BYTES_MAX:
        raise bad_input(f"a batch has at most {BATCH_BYTES_MAX} bytes; send it in parts", "requests")
    return BatchRequest(model, _split(body), dialect)


def _split(body: bytes) -> list[msgspec.Raw]:
    """The requests, whose contents are checked one by one later."""
    try:
        return _batches.decode(body).requests
    except msgspec.ValidationError as error:
        problem = str(error).replace("`", "")
        raise bad_input(f"'requests': {problem}; send a list of 1 to {BATCH_ITEMS_MAX}", "requests") from None
    except RecursionError:
        raise bad_input("the body is nested too deeply; flatten it") from None
    except ValueError as error:
        raise bad_input(malformed("the body is not valid JSON", body, error)) from None


def check_item(batch: BatchRequest, index: int) -> tuple[bytes, str | None]:
    """The body of the batch's request at this index without its reference, and the reference. Raises ApiError, which
    names the index."""
    try:
        if len(content := bytes(batch.requests[index])) > ITEM_BYTES_MAX:
            raise bad_input(f"a request of a batch has at most {ITEM_BYTES_MAX} bytes; send it by itself")
        fields = decode_body(content, _requests)
        reference = _reference(fields.pop("external_reference", msgspec.Raw(b"null")))
        body = msgspec.json.encode(fields)
        _refuse_unqueued(batch.dialect(body, b"", batch.model, 0))
    except ApiError as refusal:
        raise _placed(refusal, f"requests[{index}]") from None
    return body, reference


def _reference(raw: msgspec.Raw) -> str | None:
    try:
        return _references.decode(raw)
    except msgspec.ValidationError:
        problem = f"is a text of at most {REFERENCE_MAX} characters"
        raise bad_input(f"'external_reference' {problem}", "external_reference") from None


def _refuse_unqueued(request: AnyRequest) -> None:
    """Raises ApiError for wishes that make sense only while somebody waits for the answer."""
    if isinstance(request, GenerationRequest) and request.prompt.stream:
        raise bad_input("'stream' needs somebody who listens; leave it out of a queued request", "stream")
    assert isinstance(request, GenerationRequest | EmbeddingRequest), "a batch holds requests for text or vectors"
    options = options_in_body(request)
    if options is not None and (options.rejectIfBusy or options.requestTimeoutMs is not None):
        raise bad_input("'options': a queued request waits for its turn; leave its time limits out", "options")


def _placed(refusal: ApiError, place: str) -> ApiError:
    """The same error with the place of the request in its field: `'messages'` becomes `'requests[3].messages'`."""
    param, message = refusal.param, refusal.message
    if param is not None and f"'{param}" in message:
        message = message.replace(f"'{param}", f"'{place}.{param}", 1)
    else:
        message = f"'{place}': {message}"
    return replace(refusal, message=message, param=place if param is None else f"{place}.{param}")
