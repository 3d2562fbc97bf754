import asyncio
from pathlib import Path

from gateway.commands.access.gateway_client import operator_token
from gateway.commands.access.store_access import StoreAccess, ask_store
from gateway.settings.config import Config
from tenants.records.accounts import Account
from tenants.records.limits import NO_LIMITS


def test_a_copy_of_another_cells_account_lends_no_token_to_commands(tmp_path: Path) -> None:
    """Its tokens are made at its home; it may well be older than all accounts of this cell."""
    config = Config(state_folder=str(tmp_path))

    async def add(access: StoreAccess) -> str:
        await access.store.accounts.add(Account("a" * 32, "copy", NO_LIMITS, 1, home="eu"))
        return (await access.accounts.create("own")).id

    own = asyncio.run(ask_store(config, add, makes=True))
    with operator_token(config, None, None):
        (token,) = asyncio.run(ask_store(config, lambda access: access.accounts.tokens(own)))
        assert (token.name, token.revoked_at) == ("hearth top", None)
    (token,) = asyncio.run(ask_store(config, lambda access: access.accounts.tokens(own)))
    assert token.revoked_at is not None
