"""Why a request may not start, in words for its caller. It knows no store."""

from collections.abc import Sequence

from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, UnknownToken
from tenants.limits.caps import LimitStatus, unattainable
from tenants.records.holds import BUDGETS, Cap, DenialReason, Denied
from tenants.records.usage import MICRO


class QuotaExceeded(Exception):
    """Over a limit; nothing was kept or counted. `message` is for the caller, `retry_after_s` ≥ 1.

    `limit` is the name of the limit as in Limits, `status` what there is of it. `lasting`: no waiting makes it enough.
    """

    def __init__(self, status: LimitStatus, message: str, *, lasting: bool) -> None:
        super().__init__(message)
        self.limit = status.measure.value
        self.status = status
        self.retry_after_s = status.reset_s
        self.message = message
        self.lasting = lasting


class AlreadyRecorded(Exception):
    """A request of this id ran before and has its usage record; a new request needs a new id."""


def denial_error(denied: Denied, caller: Caller, caps: Sequence[Cap]) -> Exception:
    """The error that a denial of one of these caps is raised as, in words that say what to change."""
    reason = denied.reason
    if reason in (DenialReason.REVOKED, DenialReason.NO_ACCOUNT):
        return UnknownToken(f"ApiToken {caller.token_id} was revoked or its account is gone")
    if reason is DenialReason.SUSPENDED:
        return AccountSuspended(f"account {caller.account.id} is suspended")
    if reason is DenialReason.RECORDED:
        return AlreadyRecorded("this request id was used before; send the request under a new one")
    retry_after_s = max(1, -(-denied.retry_after_us // MICRO))
    (cap,) = [cap for cap in caps if (cap.subject, cap.measure) == (denied.subject, reason)]
    message = _explained(denied, cap, _subject_text(denied.subject, caller), retry_after_s)
    allowed = cap.allowed / MICRO if reason in BUDGETS else cap.allowed
    status = LimitStatus(cap.subject, reason, allowed, 0, retry_after_s)
    return QuotaExceeded(status, message, lasting=unattainable(cap))


def _subject_text(subject: str, caller: Caller) -> str:
    """`account acme`, `this token for models of class large`, …"""
    of_class = subject.partition("class:")[2]
    owner = "this token" if subject.startswith("token:") else f"account {caller.account.name}"
    return f"{owner} for models of class {of_class}" if of_class else owner


def _explained(refused: Denied, cap: Cap, subject: str, retry_after_s: int) -> str:
    allowed = refused.allowed
    match refused.reason:
        case DenialReason.NEURONS_PER_DAY | DenialReason.NEURONS_PER_MONTH:
            return _over_budget(refused, cap, subject)
        case DenialReason.REQUESTS_PER_MINUTE:
            return f"{subject} may start {allowed:,} requests per minute; wait {retry_after_s} s"
        case DenialReason.CONCURRENT_REQUESTS:
            return f"{subject} may run {allowed:,} requests at once; wait for one to end"
        case _:
            kind = "input" if refused.reason is DenialReason.INPUT_TOKENS_PER_MINUTE else "output"
            if cap.cost_us > cap.room_us:
                return (
                    f"this request may need {cap.amount:,} {kind} tokens, and {subject} has {allowed:,} a minute: it "
                    "can never run; shorten the prompt, lower max_tokens, or ask for a higher limit"
                )
            return f"{subject} may use {allowed:,} {kind} tokens per minute; wait {retry_after_s} s"


def _neurons(amount: float) -> str:
    """With one decimal, and exactly where that would leave little of it: 1,234.5, 0.0105."""
    return f"{amount:,.1f}" if amount >= 10 else f"{amount:.6f}".rstrip("0").rstrip(".")


def _over_budget(refused: Denied, cap: Cap, subject: str) -> str:
    needed, used, allowed = cap.min_amount / MICRO, refused.used / MICRO, refused.allowed / MICRO
    day = refused.reason is DenialReason.NEURONS_PER_DAY
    if not allowed:
        window = "day" if day else "month"
        return f"{subject} has 0 neurons for a whole {window}: ask its administrator or the operator for a higher limit"
    if needed > allowed:
        return (
            f"this request may need {_neurons(needed)} neurons, and {subject} has {_neurons(allowed)} for a whole "
            f"{'day' if day else 'month'}: it can never run; shorten the prompt, lower max_tokens, or ask the operator "
            "for a higher limit"
        )
    ends = "00:00 UTC" if day else "00:00 UTC of the first of the next month"
    return (
        f"this request may need {_neurons(needed)} neurons, and {_neurons(used)} of {'today' if day else 'this month'}"
        f"'s {_neurons(allowed)} of {subject} are used or reserved: lower max_tokens, or wait until {ends}"
    )
