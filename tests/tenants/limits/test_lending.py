"""A home cell lends from its ledger, on both stores."""

import pytest
from msgspec import structs

from tenants.limits import lending
from tenants.limits.lending import LeaseRefused, LeaseRequest, LeaseReturn, QuotaLender
from tenants.records.accounts import Account
from tenants.records.holds import DenialReason, Denied, Granted
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken, TokenDigest
from tenants.records.usage import EXPIRED, Totals
from tenants.store.protocol import Store
from tests.tenants.conftest import DayClock

pytestmark = pytest.mark.anyio
ANN = "a" * 32
ASKED = LeaseRequest(ANN, "us.1", "key", "", "", 1_000, 10, 10)


@pytest.fixture
async def lender(store: Store, clock: DayClock) -> QuotaLender:
    """Of an account with 10,000 micro-neurons a day; there are two cells beside this one."""
    await store.accounts.add(Account(ANN, "ann", Limits(neurons_per_day=0.01), 1))
    await store.accounts.add_token(ApiToken("key", ANN, "laptop", 1), TokenDigest(b"digest", 1))
    return QuotaLender(store, 2, clock)


async def totals(store: Store, day: int) -> Totals:
    balance = await store.quotas.reconcile(ANN, day)
    balance.check()
    return balance.counted


def returned(lease_id: str, day: int, used: int) -> LeaseReturn:
    return LeaseReturn(ANN, lease_id, "key", "", day, used, used)


async def test_a_slice_is_what_is_wanted_up_to_a_share_of_the_budget(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    assert await lender.lend("us", ASKED) == Granted(clock.day, 150, (9_850,)), "3 % for two cells"
    small = structs.replace(ASKED, lease_id="us.2", wanted=40)
    assert await lender.lend("us", small) == Granted(clock.day, 40, (9_810,))
    large = structs.replace(ASKED, lease_id="us.3", needed=9_400, min_needed=9_400)
    assert await lender.lend("us", large) == Granted(clock.day, 9_400, (410,)), "one call's need is not cut down"
    assert await lender.lend("ap", structs.replace(ASKED, lease_id="ap.1")) == Granted(clock.day, 102, (308,)), "a ¼"
    last = structs.replace(ASKED, lease_id="us.4", needed=400, min_needed=100)
    assert await lender.lend("us", last) == Granted(clock.day, 308, (0,))
    denied = await lender.lend("us", structs.replace(ASKED, lease_id="us.5"))
    assert isinstance(denied, Denied)
    assert denied.reason is DenialReason.NEURONS_PER_DAY
    assert (await totals(store, clock.day)).held == 10_000


async def test_the_same_question_is_answered_alike_and_counted_once(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    first = await lender.lend("us", ASKED)
    assert await lender.lend("us", ASKED) == first
    assert (await totals(store, clock.day)).held == 150


async def test_a_question_that_was_denied_and_comes_again_late_is_denied_again(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    whole = structs.replace(ASKED, lease_id="ap.1", needed=10_000, min_needed=10_000)
    await lender.lend("ap", whole)
    denied = await lender.lend("us", ASKED)
    assert isinstance(denied, Denied)
    await lender.settle("ap", returned("ap.1", clock.day, 0))
    assert await lender.lend("us", ASKED) == denied
    assert (await totals(store, clock.day)).held == 0


async def test_a_lease_of_which_nothing_is_heard_is_charged_whole_until_it_is_settled(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    await lender.lend("us", ASKED)
    clock.now_s += lending.LEASE_S + lending.MARGIN_S + 1
    await store.quotas.sweep()
    assert await totals(store, clock.day) == Totals(1, 150)
    (record,) = await store.quotas.records(ANN, clock.day)
    assert (record.outcome, record.model) == (EXPIRED, "cell/us")
    for _ in range(2):
        await lender.settle("us", returned("us.1", clock.day, 70))
    assert await totals(store, clock.day) == Totals(1, 70, 70)
    assert (await store.quotas.records(ANN, clock.day))[0].outcome == lending.ENDED


async def test_a_question_that_arrives_after_its_lease_was_given_up_gets_nothing(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    await lender.settle("us", returned("us.1", 0, 0))
    assert await lender.lend("us", ASKED) == Denied(DenialReason.RECORDED)
    assert await totals(store, clock.day) == Totals(1)


async def test_a_lease_counts_for_the_token_and_the_class_that_have_limits(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    of_class = Limits(classes={"large": Limits(neurons_per_month=0.004)})
    token = ApiToken("key2", ANN, "phone", 1, limits=structs.replace(of_class, neurons_per_day=0.002))
    await store.accounts.add_token(token, TokenDigest(b"digest", 1))
    subjects = "token:key2\ntoken:key2 class:large"
    asked = LeaseRequest(ANN, "us.1", "key2", "large", subjects, 10_000, 10, 10)
    assert await lender.lend("us", asked) == Granted(clock.day, 30, (9_970, 1_970, 3_970)), "3 % of the least"
    for subject in ("", *subjects.split("\n")):
        balance = await store.quotas.reconcile(ANN, clock.day, subject)
        balance.check()
        assert balance.counted.held == 30
    with pytest.raises(LeaseRefused, match="changed since"):
        await lender.lend("us", structs.replace(asked, lease_id="us.2", subjects="token:key2"))


async def test_what_is_no_cells_own_is_refused(store: Store, lender: QuotaLender, clock: DayClock) -> None:
    await lender.lend("us", ASKED)
    with pytest.raises(LeaseRefused, match="no lease of the cell ap"):
        await lender.settle("ap", returned("us.1", clock.day, 0))
    with pytest.raises(LeaseRefused, match="no lease of the cell ap"):
        await lender.lend("ap", ASKED)
    assert (await totals(store, clock.day)).held == 150


async def test_nothing_is_lent_of_accounts_that_are_suspended_gone_or_another_cells(
    store: Store, lender: QuotaLender, clock: DayClock
) -> None:
    bob = Account("b" * 32, "bob", Limits(), 1, home="ap")
    await store.accounts.add(bob)
    nobody = await lender.lend("us", structs.replace(ASKED, account_id="c" * 32))
    assert (
        nobody == await lender.lend("us", structs.replace(ASKED, account_id=bob.id)) == Denied(DenialReason.NO_ACCOUNT)
    )
    await store.accounts.revoke("key", 1)
    assert await lender.lend("us", ASKED) == Denied(DenialReason.REVOKED)
    ann = await store.accounts.get(ANN)
    assert ann is not None
    await store.accounts.update(structs.replace(ann, suspended_at=1, revision=2))
    assert await lender.lend("us", structs.replace(ASKED, lease_id="us.2", token_id="key3")) == Denied(
        DenialReason.SUSPENDED
    )
