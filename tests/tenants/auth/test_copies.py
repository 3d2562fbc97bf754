"""What another cell says of accounts and tokens is kept as far as it is that cell's to say."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs

from tenants.auth.accounts import AccountService
from tenants.auth.copies import AccountCopies, AccountCopy, KnownCopy
from tenants.auth.errors import UnknownToken
from tenants.records.accounts import Account
from tenants.records.grants import Grant, Permission
from tenants.records.limits import Limits
from tenants.records.tokens import ApiToken
from tenants.store.protocol import Store

pytestmark = pytest.mark.anyio
ANN, BOB, CARL = "a" * 32, "b" * 32, "c" * 32  # the last one is kept here
CREDENTIAL = "hearth_credential"
COPY = AccountCopy(Account(ANN, "ann", Limits(), 1), ApiToken("token", ANN, "laptop", 1), b"proof")


class OneCell:
    """The cell eu, which answers what a test has it say."""

    def __init__(self) -> None:
        self.copy = COPY
        self.refreshed: AccountCopy | bool = True

    def home_of(self, token_id: str) -> str | None:
        return "eu"

    async def look_up(self, cell: str, credential: str) -> AccountCopy:
        return self.copy

    async def refresh(self, cell: str, known: Sequence[KnownCopy]) -> Sequence[AccountCopy | bool]:
        return [self.refreshed for _ in known]


def said(account: str = ANN, **token: Any) -> AccountCopy:
    of_account, of_token = structs.replace(COPY.account, id=account), structs.replace(COPY.token, **token)
    return AccountCopy(of_account, of_token, COPY.proof)


WRONG = {
    "another token": said(id="other"),
    "a token of another account": said(account_id=BOB),
    "a token of a local account": said(account_id=CARL),
    "a local account": said(CARL, account_id=CARL),
    "an operator alone": said(grant=Grant((Permission.OPERATOR,))),
}


@pytest.fixture
async def cells(store: Store) -> OneCell:
    await store.accounts.add(Account(CARL, "carl", Limits(), 1))
    return OneCell()


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_cell_speaks_for_its_own_accounts_alone(
    store: Store, accounts: AccountService, cells: OneCell, wrong: AccountCopy
) -> None:
    copies = AccountCopies(store, cells, accounts.digest)
    cells.copy = wrong
    with pytest.raises(UnknownToken):
        await copies.confirm(CREDENTIAL, "token", "")
    assert await store.accounts.token("token") is None
    assert await store.accounts.tokens(CARL) == []


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
async def test_a_refreshed_copy_that_cannot_be_is_confirmed_no_more_and_ends_nothing(
    store: Store, accounts: AccountService, cells: OneCell, wrong: AccountCopy
) -> None:
    copies = AccountCopies(store, cells, accounts.digest)
    await copies.confirm(CREDENTIAL, "token", "")
    cells.refreshed = wrong
    await copies.refresh("eu")
    assert not copies._tracked
    cells.copy = wrong
    with pytest.raises(UnknownToken):
        await copies.confirm(CREDENTIAL, "token", "eu")


async def test_rights_that_reach_beyond_an_account_hold_at_its_home_alone(
    store: Store, accounts: AccountService, cells: OneCell
) -> None:
    copies = AccountCopies(store, cells, accounts.digest)
    cells.copy = said(grant=Grant((Permission.OPERATOR, Permission.INFERENCE, Permission.METRICS_READ), ("@cf/*",)))
    await copies.confirm(CREDENTIAL, "token", "")
    row = await store.accounts.token("token")
    assert row is not None
    assert row[0].grant == Grant((Permission.INFERENCE,), ("@cf/*",))
