"""The errors that callers see: status, code and message of every way in which a request is refused or fails.

It does not know how a request is parsed or served; any layer raises an ApiError, and one place answers it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import date
from difflib import get_close_matches
from typing import Final
from urllib.parse import quote

from tenants.records.batches import OPEN_BATCHES_MAX, OPEN_ITEMS_MAX

RETRY_SOON_S: Final = 1
RETRY_LATER_S: Final = 30
_IN_PATH: Final = "/:@!$&'()*+,;=-._~"  # what a URL may have there without being escaped
_IN_QUERY: Final = _IN_PATH + "?%"
_V1: Final = "/v1"
V1_PATHS: Final = tuple(  # of those below `/v1` the ones that have no parameter
    _V1 + path
    for path in (
        *("/chat/completions", "/completions", "/embeddings", "/rerank", "/responses", "/responses/input_tokens"),
        *("/messages", "/messages/count_tokens", "/models"),
    )
)
FIELD_MAX: Final = 80  # characters of a field's name in the log


@dataclass(eq=False, repr=False)
class ApiError(Exception):
    """The one way in which a request ends without its result.

    message      what went wrong and what to change; it never holds prompt or completion text, and begins with no word
                 for the kind of error: the envelope's has "AiError: " before it where a model was asked.
    param        the field of the body at fault, if there is one.
    regions      where alone the request may be served, of one that came to another one.
    location     where it is served instead: a redirect's URL.
    coined       `param` is a name of the caller's own, which no log may have.
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
    coined: bool = False
    regions: tuple[str, ...] = ()
    location: str | None = None

    @property
    def enveloped(self) -> str:
        """The message as Cloudflare's envelope has it."""
        return f"AiError: {self.message}" if self.routed else self.message

    @property
    def log_fields(self) -> dict[str, object]:
        """What the log has of it: no message, since that may name what a caller sent."""
        field = {} if self.param is None or self.coined else {"field": self.param[:FIELD_MAX]}
        return {"status": self.status, "code": self.code, "kind": self.kind, **field}

    def __post_init__(self) -> None:
        super().__init__(self.message)
        timed = self.retry_after_s is not None
        assert timed == (self.status in (429, 503)), "every 429 and 503 says when to come back"


def bad_input(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, 5006, message, kind="invalid_request", param=param)


def no_threads() -> ApiError:
    """A conversation by its id. Anthropic's SDK knows the kind, and then sends the whole conversation."""
    message = "'thread' is not supported here; nothing is stored; send all messages"
    return ApiError(400, 5006, message, kind="thread_unsupported_request", param="thread")


def body_missing() -> ApiError:
    message = "The request has no body; send a JSON object"
    return ApiError(400, 3003, message, kind="body_missing")


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"The request is too large: its body may have {limit_bytes} bytes"
    return ApiError(413, 3006, message, kind="request_too_large", closes=True)


def body_too_slow(limit_s: float) -> ApiError:
    message = f"The request's body did not arrive within {limit_s:g} s; send it faster, or less"
    return ApiError(408, 3007, message, kind="request_timeout", closes=True)


def no_such_model(name: str, suggestion: str = "") -> ApiError:
    """`suggestion` is what Catalogue.did_you_mean says."""
    lists = "GET /ai/models/search lists the models that are here"
    message = f"No such model {name[:200]} or task{suggestion or ';'} {lists}"
    return ApiError(400, 5007, message, kind="model_not_found", param="model")


def no_model_of_name(name: str, suggestion: str = "") -> ApiError:
    """A model that is looked up, not called."""
    lists = "GET /v1/models lists what is"
    message = f"There is no model '{name[:200]}' for this token{suggestion or ';'} {lists}"
    return ApiError(404, 3042, message, kind="model_not_found", param="model")


def deprecated(name: str, ended_on: date) -> ApiError:
    message = f"{name} is deprecated since {ended_on}; GET /ai/models/search lists the models that are served"
    return ApiError(410, 5028, message, kind="model_deprecated", param="model")


def too_long(problem: str) -> ApiError:
    """A prompt over a limit that the catalogue knows, or only the replica."""
    return ApiError(400, 3030, f"Sequence too long, {problem}", kind="context_length_exceeded")


def wrong_task(name: str, task: str) -> ApiError:
    """A model whose task is not the path's."""
    paths = {"Text Embeddings": "/v1/embeddings", "Text Classification": "/v1/rerank"}
    path = paths.get(task, "/v1/chat/completions")
    message = f"No such model {name} or task, it is for {task}; call /ai/run/{name} or {path}"
    return ApiError(400, 5007, message, kind="model_not_found", param="model")


def text_too_long(field: str, tokens: int, limit: int, *, cut: bool | None) -> ApiError:
    """One of a request's texts; `cut` is whether it was to be truncated, None where that is none of the choices."""
    advice = "shorten it, or set 'truncate_inputs'" if cut is False else "shorten it"
    message = f"Sequence too long, {tokens} > {limit} in '{field}'; {advice}"
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


def wrong_region(region: str, allowed: Sequence[str]) -> ApiError:
    where = f"in {region}" if region else "in a place without a name"
    message = f"This account's calls may be served in {', '.join(allowed)} alone, and this gateway is {where}"
    return ApiError(403, 9109, message, kind="wrong_region", routed=False, regions=tuple(allowed))


def redirected(refusal: ApiError, urls: Mapping[str, str], path: str, query: bytes) -> ApiError:
    """A refusal as it is, but for one of the wrong region where a gateway of an allowed one has a URL: that is where
    the request is to be sent. Host and port are the operator's alone, never the request's."""
    url = next((urls[region] for region in refusal.regions if region in urls), None)
    if url is None:
        return refusal
    location = url + quote(path, _IN_PATH) + (f"?{quote(query, _IN_QUERY)}" if query else "")
    return replace(refusal, status=307, location=location, closes=True)


def kept_at_home(home: str) -> ApiError:
    message = f"Batches are kept in the cell of their account alone, which is {home}: send the batch there"
    return ApiError(403, 9109, message, kind="wrong_cell", routed=False)


def not_permitted(permission: str) -> ApiError:
    message = f"Unauthorized to access requested resource: the token has no permission '{permission}'"
    return ApiError(403, 9109, message, kind="permission_denied", routed=False)


def origin_not_allowed(origin: str) -> ApiError:
    """A page of another origin, in a browser."""
    message = (
        f"Pages of {origin[:200]} may not call this gateway; its operator allows origins in [server] allowed_origins"
    )
    return ApiError(403, 9109, message, kind="permission_denied", routed=False)


def wrong_network() -> ApiError:
    message = "Cannot use the access token from this location: its networks are others"
    return ApiError(403, 9109, message, kind="permission_denied", routed=False)


def model_not_permitted(name: str) -> ApiError:
    message = f"The token may not call {name[:200]}; its models are others"
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
        "The call with this Idempotency-Key was answered and charged, but its answer was too large to keep; "
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
    said = path[:200]
    return ApiError(404, 7000, f"No route for that URI: {said}{_meant_path(said)}", kind="not_found", routed=False)


def _meant_path(path: str) -> str:
    """The end of a refusal of this path: where people look for, or the call that is most likely meant, with the base
    URLs of the SDKs, since most such paths begin with a wrong one. Empty where nothing is alike."""
    if path == "/":
        return "; people find the console at /console/, programs the API at /docs"
    ended = [known for known in V1_PATHS if path.rstrip("/").endswith(known.removeprefix(_V1))]
    meant = max(ended, key=len, default="") or next(iter(get_close_matches(path, V1_PATHS, 1, 0.8)), "")
    bases = "Base URLs end with /v1 for OpenAI's clients, and have no path for Anthropic's"
    return f"; did you mean {meant}? {bases}" if meant else ""


def method_not_supported(method: str, allowed: str) -> ApiError:
    message = f"{method[:20]} not supported for requested URI. It takes {allowed}"
    return ApiError(405, 7001, message, kind="method_not_allowed", routed=False, allowed=allowed)


def too_many_requests(message: str, retry_after_s: int, *, lasting: bool = False) -> ApiError:
    return ApiError(429, 3021, message, kind="rate_limit_exceeded", retry_after_s=retry_after_s, lasting=lasting)


def allocation_used(message: str, retry_after_s: int, *, lasting: bool = False) -> ApiError:
    return ApiError(429, 4006, message, kind="insufficient_quota", retry_after_s=retry_after_s, lasting=lasting)


def not_kept() -> ApiError:
    """A queued request under zero retention."""
    message = "a queued request is kept until its result is fetched, which zero retention forbids: send it by itself"
    return bad_input(f"the option 'queueRequest': {message}", "queueRequest")


def batch_ended() -> ApiError:
    """Ends a request of a batch that was cancelled while it ran; no client sees it."""
    return ApiError(409, 1009, "its batch was cancelled", kind="cancelled")


def too_many_batches() -> ApiError:
    message = (
        f"an account has at most {OPEN_BATCHES_MAX} batches that have not ended, of {OPEN_ITEMS_MAX} requests "
        "in all; wait for one to end, or cancel one"
    )
    return ApiError(429, 3021, message, kind="rate_limit_exceeded", retry_after_s=RETRY_LATER_S)


def busy(retry_after_s: int = RETRY_SOON_S) -> ApiError:
    """Capacity that others use for a moment."""
    message = "Capacity temporarily exceeded, please try again."
    return ApiError(429, 3040, message, kind="capacity_exceeded", retry_after_s=retry_after_s)


def _unavailable(message: str, retry_after_s: int, *, kind: str = "unavailable") -> ApiError:
    """A request that nothing here can serve now."""
    return ApiError(503, 3040, message, kind=kind, retry_after_s=retry_after_s)


def no_replica(model: str, retry_after_s: int, *, loading: bool) -> ApiError:
    """`loading`: the model may come in so many seconds; else its machines cannot serve it, which the log explains."""
    if loading:
        return _unavailable(f"{model} is being loaded; please try again.", retry_after_s, kind="loading")
    return _unavailable(f"Nothing can serve {model} now; please try again later.", retry_after_s)


def no_machine_in_region(model: str, allowed: Iterable[str]) -> ApiError:
    """A model that machines serve, but none where the account's calls may be served."""
    message = f"No machine in {', '.join(allowed)} has {model}, and this account's calls may be served there alone."
    return _unavailable(message, RETRY_LATER_S, kind="no_machine_in_region")


def store_unavailable() -> ApiError:
    return _unavailable("Quotas cannot be checked now; please try again.", RETRY_SOON_S, kind="store_unavailable")


def home_unavailable() -> ApiError:
    message = "The cell that keeps this account does not answer now, and what it lent this one is used up; try again."
    return _unavailable(message, RETRY_SOON_S, kind="home_unavailable")


def issuer_unavailable() -> ApiError:
    message = "The token cannot be checked now: its issuer's keys are not known yet; please try again."
    return _unavailable(message, RETRY_SOON_S, kind="issuer_unavailable")


def draining() -> ApiError:
    message = "This gateway is shutting down; please send the request again."
    return ApiError(503, 3040, message, kind="draining", retry_after_s=RETRY_SOON_S, closes=True)


def replica_lost() -> ApiError:
    message = "Internal server error, the model's replica was lost; please send the request again"
    return ApiError(500, 5000, message, kind="replica_lost")


def failed(message: str) -> ApiError:
    """A request that a replica or a batch gave up, with the reason."""
    return ApiError(500, 5000, f"Internal server error, {message or 'cancelled'}", kind="failed")


def bad_grammar(field: str, message: str) -> ApiError:
    """A grammar in this field that the replica cannot apply, with its reason."""
    return bad_input(f"'{field}': the answer cannot be held to it: {message}", field)


def grammar_not_met(problem: str, param: str) -> ApiError:
    return ApiError(400, 5024, f"JSON Mode couldn't be met, for {problem}", kind="json_not_met", param=param)


def no_adapters() -> ApiError:
    message = "Model does not support LoRa inference, adapters are not served here; leave 'lora' out"
    return ApiError(405, 5005, message, kind="adapter_not_supported", param="lora", allowed="POST")


def timed_out(limit_s: float) -> ApiError:
    message = f"Request timeout after {limit_s:g} s; ask for fewer tokens"
    return ApiError(408, 3046, message, kind="timeout")


def crashes(minutes: int) -> ApiError:
    """A request that crashed its model twice; a 4xx, so that no client library retries it."""
    message = (
        "This request was running in two crashes of its model and is refused "
        f"for {minutes} minutes; change it before you send it again"
    )
    return ApiError(422, 5012, message, kind="crashes")


def internal() -> ApiError:
    return ApiError(500, 5000, "Internal server error", kind="internal")


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
