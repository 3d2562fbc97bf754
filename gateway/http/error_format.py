"""The bodies that carry an error: Cloudflare's envelope, beside OpenAI's `error` or Anthropic's.

It does not know which path has which.
"""

import enum
from typing import Final

import msgspec

from gateway.errors import ApiError

_encode = msgspec.json.encode

OPENAI_TYPES: Final = {403: "permission_error", 429: "rate_limit_error"}  # by status, where it says more than the rest
ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
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
    """Renders Cloudflare's error body. Errors of a model's call name the request and come before the result. OpenAI's
    `error` is last: a client whose base URL is another path's then has words to show."""
    return _joined(_envelope(refusal, request_id), b'{"error":' + _openai_error(refusal, request_id) + b"}")


def openai_envelope(refusal: ApiError, request_id: str) -> bytes:
    """Renders the error body on OpenAI's paths: its `error` object and the envelope's keys, for both clients."""
    return _joined(b'{"error":' + _openai_error(refusal, request_id) + b"}", _envelope(refusal, request_id))


def anthropic_envelope(refusal: ApiError, request_id: str) -> bytes:
    """Renders Anthropic's error body, then the envelope's keys. Its SDK has classes for some `error_code`s."""
    kind = "invalid_request_error" if refusal.status < 500 else "api_error"
    error = {
        "type": ANTHROPIC_TYPES.get(refusal.status, kind),
        "message": message_with_id(refusal, request_id),
        "details": {"error_code": refusal.kind},
    }
    head = _encode({"type": "error", "error": error, "request_id": request_id})
    return _joined(head, _envelope(refusal, request_id))


def _envelope(refusal: ApiError, request_id: str) -> bytes:
    if not refusal.routed:
        errors = [{"code": refusal.code, "message": refusal.message}]
        return _encode({"result": None, "success": False, "errors": errors, "messages": []})
    errors = [{"message": f"AiError: {message_with_id(refusal, request_id)}", "code": refusal.code}]
    return _encode({"errors": errors, "success": False, "result": {}, "messages": []})


def _openai_error(refusal: ApiError, request_id: str) -> bytes:
    kind = "invalid_request_error" if refusal.status < 500 else "server_error"
    error = {
        "message": message_with_id(refusal, request_id),
        "type": refusal.kind if refusal.kind == "insufficient_quota" else OPENAI_TYPES.get(refusal.status, kind),
        "param": refusal.param,
        "code": refusal.kind,
    }
    return _encode(error)


def _joined(first: bytes, second: bytes) -> bytes:
    """One object with the members of both."""
    return first[:-1] + b"," + second[1:]


_RENDERERS: Final = {
    ErrorFormat.ENVELOPE: envelope,
    ErrorFormat.OPENAI: openai_envelope,
    ErrorFormat.ANTHROPIC: anthropic_envelope,
}


def message_with_id(refusal: ApiError, request_id: str) -> str:
    """The message with the request's id, if it has one, by which an operator finds it in the log."""
    return f"{refusal.message} ({request_id})" if request_id else refusal.message
