"""Holds what clients received against limits, ledger and counters, once all has ended; and watches while it runs.

All sums are in micro-neurons.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.catalogue.catalogue import open_catalogue
from gateway.settings.config import load_config
from tenants.limits.caps import RequestSize, caps_of
from tenants.limits.quota import HOLD_S
from tenants.limits.reservation import NeuronPrice
from tenants.records.limits import Limits
from tenants.records.usage import MICRO, UsageRecord, day_of, first_of_month
from tenants.store.protocol import Store, StoreUnavailable
from tests.end_to_end.cluster import INPUT_PRICE, OUTPUT_PRICE, Cluster, Tenant
from tests.end_to_end.crowd import End, Visit
from tests.support.stub_replica import MODEL

PRICE: Final = NeuronPrice(input=INPUT_PRICE, cached_input=INPUT_PRICE / 5, output=OUTPUT_PRICE)
STATUSES: Final = (0, 200, 422, 429, 500, 503)  # 0: nothing came; 422: it was in two crashes
UNWRITTEN_S: Final = 2.0  # a settlement is written, or in the outbox, so long after its request's end


@dataclass
class Reckoning:
    """What was found. `overspent` is what clients received beyond limits of neurons, `lease` what the requests that
    died with their gateways had held; `forgiven` is what of it their clients received and were not charged."""

    delivered: int = 0
    overspent: int = 0
    lease: int = 0
    forgiven: int = 0
    unbalanced: int = 0
    held: int = 0
    requests: int = 0
    records: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises AssertionError where anything is not as it must be."""
        assert not self.wrong, f"{len(self.wrong)} things are wrong: " + "\n".join(self.wrong[:10])
        assert self.overspent <= self.forgiven <= self.lease, self
        assert self.unbalanced == self.held == 0, self


class Watch:
    """Looks at the counters while it runs: no moment may show more than a limit allows."""

    def __init__(self, cluster: Cluster, tenants: Sequence[Tenant]) -> None:
        self._cluster = cluster
        self._tenants = tenants
        self.began_s = time.time()
        self.looks = 0
        self.wrong: list[str] = []

    @contextlib.asynccontextmanager
    async def looking(self, every_s: float = 0.1) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(every_s))
            try:
                yield
            finally:
                looking.cancel()

    async def _look(self, every_s: float) -> None:
        store = self._cluster.store()
        try:
            while True:
                for tenant in self._tenants:
                    with contextlib.suppress(StoreUnavailable):
                        await self._look_at(store, tenant)
                await asyncio.sleep(every_s)
        finally:
            await store.close()

    async def _look_at(self, store: Store, tenant: Tenant) -> None:
        measured = caps_of(tenant.subjects, RequestSize())
        found = await store.quotas.remaining(tenant.account_id, measured)
        self.looks += 1
        over = [(cap.measure, left) for cap, left in zip(measured, found, strict=True) if left < 0]
        self.wrong += [f"{measure} has {left} left" for measure, left in over]


async def reckon(cluster: Cluster, tenants: Sequence[Tenant], visits: Sequence[Visit], watch: Watch) -> Reckoning:
    """Call it when the gateways have drained. Holds of killed ones are ended first, as time would end them."""
    found = Reckoning(requests=len(visits), wrong=list(watch.wrong), ends=Counter(visit.end.value for visit in visits))
    if cluster.deaths:
        late = cluster.store(lambda: time.time() + HOLD_S + 1)
        await late.quotas.sweep()
        await late.close()
    if cluster.outbox():
        found.wrong.append(f"settlements wait in {cluster.outbox()}")
    store = cluster.store()
    days = range(day_of(int(watch.began_s * MICRO)), day_of(int(time.time() * MICRO)) + 1)
    prompts = _prompt_tokens(cluster, visits)
    for tenant in tenants:
        records: dict[str, UsageRecord] = {}
        for day in days:
            for subject, _ in tenant.subjects:
                balance = await store.quotas.reconcile(tenant.account_id, day, subject)
                found.unbalanced += balance.counted != balance.recorded
                found.held += balance.counted.open
            kept = await store.quotas.records(tenant.account_id, day)
            found.wrong += [f"{one.request_id} has two records" for one in kept if one.request_id in records]
            records |= {one.request_id: one for one in kept}
        theirs = [visit for visit in visits if visit.tenant is tenant]
        _reckon_one(found, cluster, theirs, records, prompts)
        for subject, limits in tenant.subjects:
            found.unbalanced += await _month_differs(store, tenant, subject, limits)
            found.overspent += _overspent(limits, theirs, prompts, len(days))
            found.wrong += _too_fast(limits, theirs, prompts)
    await store.close()
    return found


async def _month_differs(store: Store, tenant: Tenant, subject: str, limits: Limits) -> bool:
    """Whether what a limit of the month has left is not what its days' records leave."""
    if limits.neurons_per_month is None:
        return False
    (cap,) = caps_of([(subject, Limits(neurons_per_month=limits.neurons_per_month))], RequestSize())
    (left,) = await store.quotas.remaining(tenant.account_id, [cap])
    today = day_of(int(time.time() * MICRO))
    days = range(first_of_month(today), today + 1)
    recorded = [(await store.quotas.reconcile(tenant.account_id, day, subject)).recorded for day in days]
    return left != cap.allowed - sum(totals.micro_neurons + totals.held for totals in recorded)


def _prompt_tokens(cluster: Cluster, visits: Sequence[Visit]) -> dict[str, int]:
    """Of each prompt that any of them sent."""
    model = open_catalogue(load_config(cluster.folder / "hearth.toml")).find(MODEL)
    assert model is not None
    prompts = {visit.prompt for visit in visits}
    return {prompt: len(model.tokenizer.encode_chat([{"role": "user", "content": prompt}])) for prompt in prompts}


def _reckon_one(
    found: Reckoning,
    cluster: Cluster,
    visits: Sequence[Visit],
    records: dict[str, UsageRecord],
    prompts: dict[str, int],
) -> None:
    found.records += len(records)
    for visit in visits:
        record, prompt_tokens = records.get(visit.request_id), prompts[visit.prompt]
        orphan = _orphaned(cluster, visit)
        if complaint := complain(visit, record, prompt_tokens, orphan):
            found.wrong.append(f"{complaint}: {visit}, {record}")
        received = _received(visit, prompt_tokens)
        found.delivered += received
        if orphan and received:
            found.forgiven += max(0, received - (record.micro_neurons if record else 0))
            found.lease += PRICE.micro_neurons(prompt_tokens, 0, visit.max_tokens)


def _received(visit: Visit, prompt_tokens: int) -> int:
    return PRICE.micro_neurons(prompt_tokens, 0, visit.tokens) if visit.tokens else 0


def _overspent(limits: Limits, visits: Sequence[Visit], prompts: dict[str, int], days: int) -> int:
    """What they received beyond the day's and the month's budget."""
    received = sum(_received(visit, prompts[visit.prompt]) for visit in visits)
    budgets = [(limits.neurons_per_day, days), (limits.neurons_per_month, 1)]
    return sum(max(0, received - round(neurons * MICRO) * times) for neurons, times in budgets if neurons is not None)


def _orphaned(cluster: Cluster, visit: Visit) -> bool:
    """Its gateway was killed while it ran, or before it was surely written down."""
    return any(
        death.gateway == visit.gateway and visit.began <= death.at <= visit.ended + UNWRITTEN_S
        for death in cluster.deaths
    )


def complain(visit: Visit, record: UsageRecord | None, prompt_tokens: int, orphan: bool) -> str:
    """What is wrong with this visit and its record; "" if nothing is. The gateway of an orphan died on it."""
    if visit.end is End.HUNG or (visit.end is End.CUT and not orphan):
        return "it ended without a word"
    if visit.status not in STATUSES:
        return "this status has no cause"
    if visit.end in (End.REFUSED, End.AWAY) and not visit.retry_after_s:
        return "it was not told when to come back"
    if record is None:
        return "it has no record" if visit.tokens or visit.end is End.DONE else ""
    if visit.end is End.REFUSED:
        return "it was refused and has a record"
    if visit.end is End.AWAY and record.micro_neurons and record.outcome != "draining":  # a replica had begun with it
        return "it was not served and was charged"
    if record.completion_tokens > visit.max_tokens:
        return "it was charged for more than it asked"
    if orphan:
        return ""
    if record.completion_tokens < visit.tokens:
        return "it was given more than was charged"
    if visit.end is End.DONE:
        charged = (record.prompt_tokens, record.completion_tokens, record.outcome)
        if charged != (prompt_tokens, visit.tokens, "done"):
            return "it was given something else than was charged"
        if charged[:2] != (visit.told_prompt_tokens, visit.told_tokens):
            return "it was told something else than was charged"
    return ""


def _too_fast(limits: Limits, visits: Sequence[Visit], prompts: dict[str, int]) -> list[str]:
    """Which rates were passed between the first and the last that was served. A minute's worth may come at once."""
    served = [visit for visit in visits if visit.status == 200]
    if not served:
        return []
    minutes = (max(visit.ended for visit in served) - min(visit.began for visit in served)) / 60
    tokens = [visit for visit in served if visit.tokens]
    rates = [
        ("requests", len(served), limits.requests_per_minute, limits.at_once),
        ("output tokens", sum(visit.tokens for visit in tokens), limits.output_tokens_per_minute, None),
        ("input tokens", sum(prompts[visit.prompt] for visit in tokens), limits.input_tokens_per_minute, None),
    ]
    return [
        f"{count} {what} in {minutes:.2f} minutes, {rate} may be in one"
        for what, count, rate, at_once in rates
        if rate is not None and count > (at_once or rate) + rate * minutes + 1
    ]
