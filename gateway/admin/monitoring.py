"""How this gateway is, for the operator: alerts that fire, the store, and the tenants that use the most now. It names
accounts, and shows no prompts."""

import time
from datetime import UTC, datetime
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from gateway.admin.operation import FOR_OPERATOR, OPERATOR, AdminContext, AdminRequest, AdminResult, NoFields, Operation
from gateway.observability.alert_conditions import UNSEEN
from gateway.observability.alerts import ALERTS_MAX, Alert
from gateway.observability.recent_usage import KEPT_S, OTHERS, RecentAccountUsage
from tenants.auth.errors import NotFound
from tenants.store.protocol import StoreUnavailable

TOP_MAX: Final = 100


class AlertItem(msgspec.Struct, frozen=True):
    """A shipped rule whose condition holds since `since`; it is pending until it has held for `for_seconds`."""

    name: str
    severity: str
    state: Literal["firing", "pending"]
    since: datetime
    for_seconds: int
    labels: dict[str, str]
    value: float
    summary: str
    description: str


class UnseenItem(msgspec.Struct, frozen=True):
    """A shipped rule that this gateway cannot evaluate, and why."""

    name: str
    why: str


class AlertsItem(msgspec.Struct, frozen=True):
    """What this gateway sees by its own metrics, without other gateways'; `rules` are evaluated."""

    alerts: Annotated[list[AlertItem], Meta(max_length=ALERTS_MAX)]
    rules: int
    unseen: list[UnseenItem]


class StoreItem(msgspec.Struct, frozen=True):
    """`answers` is whether the store takes a write at this moment, in `answer_ms`; `problem` says why not. `away`: this
    gateway waits for it, since a decision failed. Settlements wait in memory (`unsettled`) or on this host's disk
    (`outbox_bytes`). `different_days` are accounts' days whose counters differ from their records. `advice`: how to set
    it up better."""

    kind: str
    answers: bool
    answer_ms: float
    problem: str
    away: bool
    outages: int
    open_reservations: int
    unsettled: int
    outbox_bytes: int
    outbox_damaged_files: int
    different_days: int
    advice: list[str]


class TopQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The last `seconds`, to five more, by what accounts used most of."""

    seconds: Annotated[int, Meta(ge=5, le=KEPT_S)] = 60
    by: Literal["tokens", "requests", "neurons", "refused", "running"] = "tokens"
    limit: Annotated[int, Meta(ge=1, le=TOP_MAX)] = 20


class TopItem(msgspec.Struct, frozen=True):
    """An account's calls that ended lately, those over a limit among them, and those `running` now. `account` is null
    for all that were too many to be told apart, and `name` for an account that is gone."""

    account: str | None
    name: str | None
    plan: str | None
    running: int
    requests: int
    refused: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    neurons: float


class TopAccountsItem(msgspec.Struct, frozen=True):
    """At this gateway; `active` accounts in all ended a call or have one running."""

    seconds: int
    active: int
    accounts: list[TopItem]


async def alerts(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[AlertsItem]:
    """Firing ones first, critical before others."""
    order = ("critical", "warning", "info")
    items = [_alert(alert) for alert in context.alerts.alerts()]
    items.sort(key=lambda item: (item.state, order.index(item.severity)))
    unseen = [UnseenItem(name, why) for name, why in UNSEEN.items()]
    return AdminResult(AlertsItem(items, len(context.alerts.rules) - len(unseen), unseen))


def _alert(alert: Alert) -> AlertItem:
    rule, labels = alert.rule, dict(alert.labels)
    return AlertItem(
        name=rule.name,
        severity=rule.severity,
        state="firing" if alert.firing else "pending",
        since=datetime.fromtimestamp(alert.since, UTC),
        for_seconds=rule.for_s,
        labels=labels,
        value=alert.value,
        summary=rule.summary_of(labels, alert.value),
        description=rule.description,
    )


async def store(context: AdminContext, request: AdminRequest[NoFields, NoFields]) -> AdminResult[StoreItem]:
    """Asks the store; one that is away is an answer and no error."""
    began, problem, advice = time.perf_counter(), "", []
    try:
        await context.store.ping()
        answer_ms = 1000 * (time.perf_counter() - began)
        advice = list(await context.store.advice())
    except StoreUnavailable as away:
        answer_ms, problem = 1000 * (time.perf_counter() - began), str(away)
    state = context.metrics.store_state()
    return AdminResult(
        StoreItem(
            kind=context.store_kind,
            answers=not problem,
            answer_ms=round(answer_ms, 3),
            problem=problem,
            away=not state.available,
            outages=state.outages,
            open_reservations=state.open_reservations,
            unsettled=state.unsettled,
            outbox_bytes=state.outbox_bytes,
            outbox_damaged_files=state.outbox_damaged_files,
            different_days=state.different_days,
            advice=advice,
        )
    )


async def top_accounts(
    context: AdminContext, request: AdminRequest[TopQuery, NoFields]
) -> AdminResult[TopAccountsItem]:
    query, running = request.query, context.running()
    sums = context.metrics.account_usage.recent.sums(query.seconds)
    for account_id in running:
        sums.setdefault(account_id, RecentAccountUsage())

    def measure(entry: tuple[str, RecentAccountUsage]) -> tuple[float, str]:
        account_id, used = entry
        counts = {
            "tokens": used.prompt_tokens + used.completion_tokens,
            "requests": used.requests,
            "neurons": used.neurons,
            "refused": used.refused,
            "running": running.get(account_id, 0),
        }
        return -counts[query.by], account_id

    chosen = sorted(sums.items(), key=measure)[: query.limit]
    items = [await _top_item(context, account_id, used, running.get(account_id, 0)) for account_id, used in chosen]
    return AdminResult(TopAccountsItem(query.seconds, len(sums), items))


async def _top_item(context: AdminContext, account_id: str, used: RecentAccountUsage, running: int) -> TopItem:
    name = plan = None
    if account_id != OTHERS:
        try:
            account = await context.accounts.get(account_id)
            name, plan = account.name, account.plan.name
        except NotFound:
            pass
    return TopItem(
        account=account_id or None,
        name=name,
        plan=plan,
        running=running,
        requests=used.requests,
        refused=used.refused,
        prompt_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        completion_tokens=used.completion_tokens,
        neurons=round(used.neurons, 6),
    )


OPERATIONS: Final = (
    Operation(
        "GET", f"{OPERATOR}/alerts", alerts, FOR_OPERATOR, "The shipped alerts that fire now, as this gateway sees them"
    ),
    Operation("GET", f"{OPERATOR}/store", store, FOR_OPERATOR, "Whether the store answers, and what waits for it"),
    Operation(
        "GET", f"{OPERATOR}/top", top_accounts, FOR_OPERATOR, "The accounts that use the most of this gateway now"
    ),
)
