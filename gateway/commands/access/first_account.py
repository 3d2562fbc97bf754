"""The account of the first start, its token, and a first call with it."""

import asyncio
import contextlib
import itertools
import shlex
from functools import partial
from typing import Final

import msgspec

from gateway.commands.access.store_access import StoreAccess, ask_store
from gateway.settings.config import Config
from gateway.state_dir import Credentials, read_credentials, write_credentials
from tenants.auth.errors import NameInUse, NotFound, Unauthenticated
from tenants.records.grants import Grant, Permission

# All that a team can do: who starts a server looks at the console next, where a token that only calls sees half.
FIRST_GRANT: Final = Grant((Permission.INFERENCE, Permission.USAGE_READ, Permission.ACCOUNT_ADMIN))


def first_credentials(config: Config, url: str) -> Credentials:
    """The credentials of the first start if they still open an account, else new ones; with this base_url. Raises
    StoreUnavailable."""
    return asyncio.run(ask_store(config, partial(_credentials, config, url), makes=True))


async def _credentials(config: Config, url: str, access: StoreAccess) -> Credentials:
    await access.store.ping()
    known = read_credentials(config)
    if known is not None:
        try:
            await access.accounts.verify(known.token)
        except (Unauthenticated, NotFound):
            known = None
    if known is None:
        known = Credentials(url, *await _open_first(access))
    credentials = msgspec.structs.replace(known, base_url=url)
    write_credentials(config, credentials)
    return credentials


async def _open_first(access: StoreAccess) -> tuple[str, str]:
    """The id and the token of a new account: `first`, or with a number where an earlier one's credentials were lost."""
    for name in itertools.chain(["first"], (f"first {number}" for number in itertools.count(2))):
        with contextlib.suppress(NameInUse):
            account, token = await access.open_account(name, grant=FIRST_GRANT)
            return account.id, token
    raise AssertionError("names end never")


def first_call(credentials: Credentials, model: str) -> str:
    """A shell line that streams an answer."""
    url = f"{credentials.base_url}/client/v4/accounts/{credentials.account_id}/ai/run/{model}"
    system = "You are the assistant of Harbour Books. Opening hours: Monday to Friday, 9:00 to 18:00."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "When are you open?"}]
    body = msgspec.json.encode({"messages": messages, "stream": True}).decode()
    authorization = f"Authorization: Bearer {credentials.token}"
    return shlex.join(["curl", "-N", url, "-H", authorization, "-H", "Content-Type: application/json", "-d", body])
