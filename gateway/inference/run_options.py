"""How a call is to be run: the options in its query and its headers, joined with those of its body.

It does not know bodies, and decides nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway.errors import bad_input
from gateway.http.json_body import decode_query, query_fields, query_options

TAGS_MAX: Final = 5
TIMEOUT_MS_MAX: Final = 3_600_000
METADATA_MAX: Final = 5
METADATA_BYTES_MAX: Final = 2048
METADATA_NAME_MAX: Final = 64  # characters
METADATA_TEXT_MAX: Final = 512
SESSION_BYTES_MAX: Final = 256

Tag = Annotated[str, Meta(min_length=1, max_length=50, pattern=r"^[A-Za-z0-9:\-./@]+$(?!\n)")]
Tags = Annotated[list[Tag], Meta(max_length=TAGS_MAX)]
TimeoutMs = Annotated[int, Meta(ge=1, le=TIMEOUT_MS_MAX)]
Truth = Literal["true", "false", "1", "0", ""]
_Key = Annotated[str, Meta(max_length=METADATA_NAME_MAX)]
_Value = Annotated[str, Meta(max_length=METADATA_TEXT_MAX)] | int | float | bool


class RunQuery(msgspec.Struct, frozen=True):
    """The known run options; `tags` are separated by commas, or repeated. Others change nothing."""

    rejectIfBusy: Truth = ""
    requestTimeoutMs: TimeoutMs | None = None
    tags: Annotated[str, Meta(extra_json_schema={"pattern": r"^[A-Za-z0-9:\-./@,]*$"})] = ""


class RunOptionsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`options` of a native body: the same as in the query."""

    rejectIfBusy: bool = False
    requestTimeoutMs: TimeoutMs | None = None
    tags: Tags = []


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`timeout_ms` bounds the whole call. `tags` and `metadata`, a JSON object, go into its usage record. Calls of one
    account with the same `session` go to the same replica, while they can. Requests of batches run in the `background`.
    """

    reject_if_busy: bool = False
    timeout_ms: int | None = None
    tags: tuple[str, ...] = ()
    metadata: str = ""
    session: bytes = b""
    background: bool = False

    def joined(self, body: RunOptionsBody | None) -> "RunOptions":
        """These options joined with the body's. Raises ApiError where tags are then too many."""
        if body is None:
            return self
        tags = tuple(dict.fromkeys((*self.tags, *body.tags)))
        if len(tags) > TAGS_MAX:
            raise bad_input(f"'tags': send at most {TAGS_MAX} of them, in the query and the body together", "tags")
        timeout_ms = _min(self.timeout_ms, body.requestTimeoutMs)
        return replace(self, reject_if_busy=self.reject_if_busy or body.rejectIfBusy, timeout_ms=timeout_ms, tags=tags)


def run_options(headers: Mapping[bytes, bytes], query: bytes) -> RunOptions:
    """The options of a call's query and headers. Raises ApiError."""
    options = decode_query(query, RunQuery) if query else RunQuery()
    return RunOptions(
        reject_if_busy=options.rejectIfBusy in ("true", "1"),
        timeout_ms=_min(options.requestTimeoutMs, _timeout_ms(headers.get(b"cf-aig-request-timeout"))),
        tags=_tags(query) if query else (),
        metadata=_metadata(headers.get(b"cf-aig-metadata")),
        session=_session(headers.get(b"x-session-affinity", b"")),
    )


def refuse_options(query: bytes) -> None:
    """Raises ApiError for run options that a live call cannot have."""
    options = query_options(query) if query else {}
    for name in ("queueRequest", "websocket", "returnRawResponse"):
        if options.get(name, "") not in ("false", "0", ""):
            raise bad_input(f"the option '{name}' is not supported here; leave it out", name)


def _min(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _tags(query: bytes) -> tuple[str, ...]:
    tags = [tag for value in query_fields(query).get("tags", []) for tag in value.split(",") if tag]
    try:
        return tuple(dict.fromkeys(msgspec.convert(tags, Tags)))
    except msgspec.ValidationError:
        raise bad_input(
            f"'tags' are at most {TAGS_MAX}, each of 1 to 50 letters, digits and : - . / @, with commas between", "tags"
        ) from None


def _timeout_ms(header: bytes | None) -> int | None:
    if header is None:
        return None
    if not header.isdigit() or len(header) > 9 or not 1 <= int(header) <= TIMEOUT_MS_MAX:
        raise bad_input(f"the header 'cf-aig-request-timeout' is a whole number of milliseconds, 1 to {TIMEOUT_MS_MAX}")
    return int(header)


def _session(header: bytes) -> bytes:
    if len(header) > SESSION_BYTES_MAX:
        raise bad_input(f"the header 'x-session-affinity' has at most {SESSION_BYTES_MAX} bytes")
    return header


_metadata_decoder: Final = msgspec.json.Decoder(dict[_Key, _Value])


def _metadata(header: bytes | None) -> str:
    if header is None:
        return ""
    try:
        metadata = _metadata_decoder.decode(header) if len(header) <= METADATA_BYTES_MAX else None
    except (ValueError, RecursionError):
        metadata = None
    if metadata is None or len(metadata) > METADATA_MAX:
        raise bad_input(
            f"the header 'cf-aig-metadata' is a JSON object of at most {METADATA_MAX} texts, numbers and truths, in at "
            f"most {METADATA_BYTES_MAX} bytes; "
            f"names have at most {METADATA_NAME_MAX} characters, texts {METADATA_TEXT_MAX}"
        )
    return msgspec.json.encode(metadata).decode() if metadata else ""
