"""The bodies that carry an error: Cloudflare's envelope, and OpenAI's and Anthropic's errors with the envelope beside.

It does not know which path has which.
"""

import enum
from typing import Final

import msgspec

from gateway.errors import ApiError

_encode = msgspec.json.encode

OPENAI_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ErrorFormat(enum.Enum):
    """The form of the bodies of a path's errors."""

    ENVELOPE = "envelope"
    OPENAI = "openai"
    ANTHROPIC = "anthropic"


def error_body(error_format: ErrorFormat, refusal: ApiError, request_id: str) -> bytes:
    """Renders the body of an answer that is an error."""
    return _RENDERERS[error_format](refusal, request_id)


def envelope(refusal: ApiError, request_id: str) -> bytes:
    """Renders Cloudflare's error body. Errors of a model's call name the request and come before the result."""
    if not refusal.routed:
        errors = [{"code": refusal.code, "message": refusal.message}]
        return _encode({"result": None, "success": False, "errors": errors, "messages": []})
    errors = [{"message": message_with_id(refusal, request_id), "code": refusal.code}]
    return _encode({"errors": errors, "success": False, "result": {}, "messages": []})


def openai_envelope(refusal: ApiError, request_id: str) -> bytes:
    """Renders the error body on OpenAI's paths: its `error` object and the envelope's keys, for both clients."""
    error = {
        "message": message_with_id(refusal, request_id),
        "type": OPENAI_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error"),
        "param": refusal.param,
        "code": refusal.kind,
    }
    return b'{"error":' + _encode(error) + b"," + envelope(refusal, request_id)[1:]


def anthropic_envelope(refusal: ApiError, request_id: str) -> bytes:
    """Renders Anthropic's error body, then the envelope's keys. Its SDK has classes for some `error_code`s."""
    error = {
        "type": ANTHROPIC_TYPES.get(refusal.status, "api_error"),
        "message": message_with_id(refusal, request_id),
        "details": {"error_code": refusal.kind},
    }
    head = _encode({"type": "error", "error": error, "request_id": request_id})
    return head[:-1] + b"," + envelope(refusal, request_id)[1:]


_RENDERERS: Final = {
    ErrorFormat.ENVELOPE: envelope,
    ErrorFormat.OPENAI: openai_envelope,
    ErrorFormat.ANTHROPIC: anthropic_envelope,
}


def message_with_id(refusal: ApiError, request_id: str) -> str:
    """The message with the request's id, by which an operator finds it in the log."""
    return f"{refusal.message} ({request_id})"
