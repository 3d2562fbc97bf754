"""The errors that callers see: status, code and message of every way in which a request is refused or fails.

It does not know how a request is parsed or served; any layer raises an ApiError, and one place answers it.
"""

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from datetime import date
from typing import Final

from tenants.records.batches import OPEN_BATCHES_MAX, OPEN_ITEMS_MAX

RETRY_SOON_S: Final = 1
RETRY_LATER_S: Final = 30


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """The one way in which a request ends without its result.

    message      what went wrong and what to change; it never holds prompt or completion text.
    param        the field of the body at fault, if there is one.
    kind         OpenAI's `error.code`, and the outcome in the usage record and the metrics.
    routed       False if no model was reached: the envelope's result is then null instead of {}.
    retry_after_s  whole seconds; set on every 429 and 503.
    closes       the rest of the request is not read: the connection ends with the answer.
    allowed      the methods that the path has; set on every 405.
    lasting      a 429 that stays however long one waits, until a limit or the request changes.
    """

    status: int
    code: int
    message: str
    _: KW_ONLY
    kind: str
    param: str | None = None
    retry_after_s: int | None = None
    routed: bool = True
    closes: bool = False
    allowed: str | None = None
    lasting: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)
        timed = self.retry_after_s is not None
        assert timed == (self.status in (429, 503)), "every 429 and 503 says when to come back"


def bad_input(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, 5006, f"AiError: Bad input: Error: {message}", kind="invalid_request", param=param)


def no_threads() -> ApiError:
    """A conversation by its id. Anthropic's SDK knows the kind, and then sends the whole conversation."""
    message = "AiError: Bad input: Error: 'thread' is not supported here; nothing is stored; send all messages"
    return ApiError(400, 5006, message, kind="thread_unsupported_request", param="thread")


def body_missing() -> ApiError:
    message = "AiError: Request is missing headers or body: body; send a JSON object"
    return ApiError(400, 3003, message, kind="body_missing")


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"AiError: Request too large: the body may have {limit_bytes} bytes"
    return ApiError(413, 3006, message, kind="request_too_large", closes=True)


def body_too_slow(limit_s: float) -> ApiError:
    message = f"AiError: Request timeout: the body did not arrive within {limit_s:g} s"
    return ApiError(408, 3007, message, kind="request_timeout", closes=True)


def no_such_model(name: str) -> ApiError:
    message = f"AiError: No such model {name[:200]} or task; GET /ai/models/search lists the models that are here"
    return ApiError(400, 5007, message, kind="model_not_found", param="model")


def no_model_of_name(name: str) -> ApiError:
    """A model that is looked up, not called."""
    message = f"AiError: Model name invalid: there is no '{name[:200]}' for this token; GET /v1/models lists what is"
    return ApiError(404, 3042, message, kind="model_not_found", param="model")


def deprecated(name: str, ended_on: date) -> ApiError:
    message = f"AiError: {name} is deprecated since {ended_on}; GET /ai/models/search lists the models that are served"
    return ApiError(410, 5028, message, kind="model_deprecated", param="model")


def too_long(problem: str) -> ApiError:
    """A prompt over a limit that the catalogue knows, or only the replica."""
    return ApiError(400, 3030, f"AiError: Sequence too long: {problem}", kind="context_length_exceeded")


def wrong_task(name: str, task: str) -> ApiError:
    """A model whose task is not the path's."""
    paths = {"Text Embeddings": "/v1/embeddings", "Text Classification": "/v1/rerank"}
    path = paths.get(task, "/v1/chat/completions")
    message = f"AiError: No such model {name} or task: it is for {task}; call /ai/run/{name} or {path}"
    return ApiError(400, 5007, message, kind="model_not_found", param="model")


def text_too_long(field: str, tokens: int, limit: int, *, cut: bool) -> ApiError:
    """One of a request's texts; `cut` is whether the gateway could truncate it."""
    advice = "shorten it, or set 'truncate_inputs'" if cut else "shorten it"
    message = f"AiError: Sequence too long: {tokens} > {limit}: '{field}'; {advice}"
    return ApiError(400, 3030, message, kind="context_length_exceeded", param=field)


def unauthenticated() -> ApiError:
    message = "Authentication error: send 'Authorization: Bearer <token>' with a token that is in force"
    return ApiError(401, 10000, message, kind="invalid_api_key", routed=False)


def token_ended() -> ApiError:
    """A token that was in force when the request began."""
    message = "Authentication error: the token was revoked or has expired; send the request with another one"
    return ApiError(401, 10000, message, kind="invalid_api_key", routed=False)


def malformed_token() -> ApiError:
    message = "Authentication failed: the token is malformed; send 'Authorization: Bearer <token>' as it was minted"
    return ApiError(401, 9106, message, kind="invalid_api_key", routed=False)


def too_many_failures(retry_after_s: int) -> ApiError:
    """A credential that opens nothing, from an address that sent many of them."""
    message = (
        f"Authentication failed too often from this address; wait {retry_after_s} s, and send a token that is in force"
    )
    return ApiError(429, 9106, message, kind="rate_limit_exceeded", retry_after_s=retry_after_s, routed=False)


def suspended() -> ApiError:
    message = "This account is suspended; its operator can say why and resume it"
    return ApiError(403, 9109, message, kind="account_suspended", routed=False)


def wrong_region(region: str, allowed: Iterable[str]) -> ApiError:
    where = f"in {region}" if region else "in a place without a name"
    message = f"This account's calls may be served in {', '.join(allowed)} alone, and this gateway is {where}"
    return ApiError(403, 9109, message, kind="wrong_region", routed=False)


def not_permitted(permission: str) -> ApiError:
    message = f"Unauthorized to access requested resource: the token has no permission '{permission}'"
    return ApiError(403, 9109, message, kind="permission_denied", routed=False)


def wrong_network() -> ApiError:
    message = "Cannot use the access token from this location: its networks are others"
    return ApiError(403, 9109, message, kind="permission_denied", routed=False)


def model_not_permitted(name: str) -> ApiError:
    message = f"AiError: The token may not call {name[:200]}; its models are others"
    return ApiError(403, 3041, message, kind="model_not_permitted", param="model")


def not_found(thing: str) -> ApiError:
    """The same for another account's token or batch, and one that does not exist, or no more."""
    return ApiError(404, 1003, f"No such {thing}", kind="not_found", routed=False)


def conflict(message: str) -> ApiError:
    return ApiError(409, 1009, message, kind="conflict", routed=False)


def changed_meanwhile() -> ApiError:
    message = "It is not, or no more, what If-Match or If-None-Match says: read it again, and change what there is now"
    return ApiError(412, 1012, message, kind="precondition_failed", routed=False)


def key_in_use() -> ApiError:
    message = (
        "A request with this Idempotency-Key is in progress, or was broken off: look whether it had its effect before "
        "you send it with another key"
    )
    return ApiError(409, 1010, message, kind="idempotency_key_in_use", routed=False)


def key_reused() -> ApiError:
    message = "This Idempotency-Key belongs to another request of the last 24 hours; take a new one for each"
    return ApiError(422, 1011, message, kind="idempotency_key_reused", routed=False)


def answer_not_kept() -> ApiError:
    message = (
        "AiError: The call with this Idempotency-Key was answered and charged, but its answer was too large to keep; "
        "send the request with another key to make it again"
    )
    return ApiError(409, 1010, message, kind="idempotency_key_in_use")


def foreign_account() -> ApiError:
    """The same for an account that exists and one that does not."""
    message = "Authentication error: the token is another account's; leave the account out of the path, or name its own"
    return ApiError(403, 10000, message, kind="account_not_accessible", routed=False)


def bad_account_id(path: str) -> ApiError:
    message = f"Could not route to {path[:200]}, perhaps your object identifier is invalid?"
    return ApiError(404, 7003, message, kind="not_found", routed=False)


def no_route(path: str) -> ApiError:
    return ApiError(404, 7000, f"No route for that URI: {path[:200]}", kind="not_found", routed=False)


def method_not_supported(method: str, allowed: str) -> ApiError:
    message = f"{method[:20]} not supported for requested URI. It takes {allowed}"
    return ApiError(405, 7001, message, kind="method_not_allowed", routed=False, allowed=allowed)


def too_many_requests(message: str, retry_after_s: int, *, lasting: bool = False) -> ApiError:
    message = f"AiError: {message}"
    return ApiError(429, 3021, message, kind="rate_limit_exceeded", retry_after_s=retry_after_s, lasting=lasting)


def allocation_used(message: str, retry_after_s: int, *, lasting: bool = False) -> ApiError:
    message = f"AiError: {message}"
    return ApiError(429, 4006, message, kind="insufficient_quota", retry_after_s=retry_after_s, lasting=lasting)


def not_kept() -> ApiError:
    """A queued request under zero retention."""
    message = "a queued request is kept until its result is fetched, which zero retention forbids: send it by itself"
    return bad_input(f"the option 'queueRequest': {message}", "queueRequest")


def batch_ended() -> ApiError:
    """Ends a request of a batch that was cancelled while it ran; no client sees it."""
    return ApiError(409, 1009, "AiError: its batch was cancelled", kind="cancelled")


def too_many_batches() -> ApiError:
    message = (
        f"AiError: an account has at most {OPEN_BATCHES_MAX} batches that have not ended, of {OPEN_ITEMS_MAX} requests "
        "in all; wait for one to end, or cancel one"
    )
    return ApiError(429, 3021, message, kind="rate_limit_exceeded", retry_after_s=RETRY_LATER_S)


def busy(retry_after_s: int = RETRY_SOON_S) -> ApiError:
    """Capacity that others use for a moment."""
    message = "AiError: Capacity temporarily exceeded, please try again."
    return ApiError(429, 3040, message, kind="capacity_exceeded", retry_after_s=retry_after_s)


def _unavailable(message: str, retry_after_s: int, *, kind: str = "unavailable") -> ApiError:
    """A request that nothing here can serve now."""
    return ApiError(503, 3040, f"AiError: {message}", kind=kind, retry_after_s=retry_after_s)


def no_replica(model: str, retry_after_s: int, *, loading: bool) -> ApiError:
    """`loading`: the model may come in so many seconds; else its machines cannot serve it, which the log explains."""
    if loading:
        return _unavailable(f"{model} is being loaded; please try again.", retry_after_s, kind="loading")
    return _unavailable(f"Nothing can serve {model} now; please try again later.", retry_after_s)


def store_unavailable() -> ApiError:
    return _unavailable("Quotas cannot be checked now; please try again.", RETRY_SOON_S, kind="store_unavailable")


def issuer_unavailable() -> ApiError:
    message = "The token cannot be checked now: its issuer's keys are not known yet; please try again."
    return _unavailable(message, RETRY_SOON_S, kind="issuer_unavailable")


def draining() -> ApiError:
    message = "This gateway is shutting down; please send the request again."
    return _unavailable(message, RETRY_SOON_S, kind="draining")


def replica_lost() -> ApiError:
    message = "AiError: AiError: Internal server error: the model's replica was lost; please send the request again"
    return ApiError(500, 5000, message, kind="replica_lost")


def failed(message: str) -> ApiError:
    """A request that a replica or a batch gave up, with the reason."""
    return ApiError(500, 5000, f"AiError: AiError: Internal server error: {message or 'cancelled'}", kind="failed")


def bad_grammar(field: str, message: str) -> ApiError:
    """A grammar in this field that the replica cannot apply, with its reason."""
    return bad_input(f"'{field}': the answer cannot be held to it: {message}", field)


def grammar_not_met(problem: str, param: str) -> ApiError:
    return ApiError(400, 5024, f"AiError: JSON Mode couldn't be met: {problem}", kind="json_not_met", param=param)


def no_adapters() -> ApiError:
    message = "AiError: Model does not support LoRa inference: adapters are not served here; leave 'lora' out"
    return ApiError(405, 5005, message, kind="adapter_not_supported", param="lora", allowed="POST")


def timed_out(limit_s: float) -> ApiError:
    message = f"AiError: Request timeout: it took more than {limit_s:g} s; ask for fewer tokens"
    return ApiError(408, 3046, message, kind="timeout")


def crashes(minutes: int) -> ApiError:
    """A request that crashed its model twice; a 4xx, so that no client library retries it."""
    message = (
        "AiError: This request was running in two crashes of its model and is refused "
        f"for {minutes} minutes; change it before you send it again"
    )
    return ApiError(422, 5012, message, kind="crashes")


def internal() -> ApiError:
    return ApiError(500, 5000, "AiError: AiError: Internal server error", kind="internal")


def bad_head(fault: str) -> ApiError:
    """A request's head that could be read in more than one way, or in none."""
    return ApiError(400, 6003, f"Invalid request headers: {fault}", kind="invalid_request", routed=False, closes=True)


def head_too_large() -> ApiError:
    message = "Invalid request headers: they are too large; send fewer or shorter ones"
    return ApiError(431, 6003, message, kind="request_too_large", routed=False, closes=True)


def head_too_slow() -> ApiError:
    message = "Request timeout: the request's head did not arrive in time"
    return ApiError(408, 3007, message, kind="request_timeout", routed=False, closes=True)


def too_many_connections() -> ApiError:
    message = "Too many connections at once; please try again on fewer of them."
    return ApiError(503, 3040, message, kind="unavailable", retry_after_s=RETRY_SOON_S, routed=False, closes=True)


def misdirected() -> ApiError:
    message = "This host is not served here; call the gateway by one of its names"
    return ApiError(421, 7000, message, kind="misdirected_request", routed=False)
