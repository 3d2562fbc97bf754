"""Opens the store for the operator's commands, whether a server runs or not: both see the same one."""

import asyncio
import contextlib
import difflib
import os
import pwd
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from gateway.commands.access.own_host import require_no_machine
from gateway.commands.terminal.options import SOURCE
from gateway.commands.terminal.output import fail
from gateway.settings.config import Config, SettingsError
from gateway.state_dir import server_secret
from tenants.audit import AuditLog, fit_detail
from tenants.auth.accounts import AccountService
from tenants.auth.errors import Conflict, NameInUse, NotFound
from tenants.open import open_store, safe_url
from tenants.records.accounts import DEFAULT_PLAN, Account
from tenants.records.grants import Grant
from tenants.records.limits import NO_LIMITS, Limits
from tenants.store.protocol import Store, StoreUnavailable

ACTOR = "command line"
_SQLITE = "sqlite:"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """The tenants' side of one store. `secret` is the server's; `notes` are the actions that were noted here."""

    store: Store
    secret: bytes
    accounts: AccountService
    audit: AuditLog
    notes: list[str] = field(default_factory=list)

    async def find(self, reference: str) -> Account:
        """The account of this id or name. Raises NotFound, with names like it, and AmbiguousName with ids."""
        try:
            return await self.accounts.find(reference)
        except NotFound as error:
            names = {account.name.casefold(): account.name for account in await self.accounts.list()}
            alike = [repr(names[name]) for name in difflib.get_close_matches(reference.casefold(), names)]
            raise NotFound(error.args[0] + (f"; did you mean {' or '.join(alike)}?" if alike else "")) from None

    async def note(self, account_id: str, action: str, target: str, **detail: Any) -> None:
        """Writes into the audit log what was just done, with the name of this process's user. Call it before you say
        that it is done. A detail that is too long is replaced by its digest."""
        user = {"os_user": _os_user()}
        await self.audit.write(account_id, ACTOR, action, target, **fit_detail({**user, **detail}, **user))
        self.notes.append(action)

    async def open_account(
        self, name: str, ceiling: Limits = NO_LIMITS, plan: str = DEFAULT_PLAN.name, grant: Grant | None = None
    ) -> tuple[Account, str]:
        """A new account, and the text of its first token, which may call models where no grant says otherwise."""
        account = await self.accounts.create(name, ceiling, plan)
        await self.note(account.id, "account.create", account.id, name=account.name, plan=plan, ceiling=ceiling)
        token, text = await self.accounts.mint(account.id, "first", grant=grant)
        await self.note(account.id, "token.create", token.id, name=token.name, permissions=token.grant.permissions)
        return account, text


Access = Annotated[StoreAccess, SOURCE]


@contextlib.asynccontextmanager
async def opened_store(url: str) -> AsyncIterator[Store]:
    """The store of this URL, closed at the end. Raises what opening it does; SettingsError where the URL is none."""
    try:
        store = open_store(url)
    except ValueError as error:
        raise SettingsError(f"[store] of hearth.toml: {error}") from None
    try:
        yield store
    finally:
        await store.close()


def store_place(config: Config) -> str:
    """Where the configured store is, for people: the whole path of a file, a URL without its password."""
    if config.store_url.startswith(_SQLITE):
        return str(Path(config.store_url.removeprefix(_SQLITE)).resolve())
    return safe_url(config.store_url)


def store_exists(config: Config) -> bool:
    """Whether there is one: of a store in Redis it is not known before it is asked."""
    return not config.store_url.startswith(_SQLITE) or Path(store_place(config)).exists()


def require_store(config: Config) -> None:
    """Raises SettingsError where there is no store yet, or it is none of this state folder's secret."""
    require_no_machine(config)
    if not store_exists(config):
        missing = f"there is no store at {store_place(config)}"
    elif not config.secret_path.exists():
        missing = f"there is no server's secret at {config.secret_path.resolve()}"
    else:
        return
    raise SettingsError(
        f"{missing}: --state or --config names another place; `hearth serve` or `hearth accounts create NAME` makes one"
    )


async def ask_store(config: Config, question: Callable[[StoreAccess], Awaitable[T]], *, makes: bool = False) -> T:
    """The answer of `question` to the tenants' side of the configured store, which is made where it is missing if this
    question `makes` one. Raises what the store does, and SettingsError where there is none."""
    if makes:
        require_no_machine(config)
    else:
        require_store(config)
    secret = server_secret(config)
    async with opened_store(config.store_url) as store:
        from gateway.other_cells import cell_name  # only here: it reads certificates, and `hearth serve` does not

        accounts = AccountService(store, secret, cell=cell_name(config))
        return await question(StoreAccess(store, secret, accounts, AuditLog(store.audit, secret)))


def with_store_access(
    config: Config, question: Callable[[StoreAccess], Awaitable[int | None]], *, makes: bool = False
) -> int:
    """Runs `question` and returns its exit status; prints on stderr what the store refuses, and what it has got. Raises
    OSError, which may be of the command's own files."""

    async def asked(access: StoreAccess) -> int | None:
        try:
            return await question(access)
        finally:
            if access.notes:
                print(f"stored in {store_place(config)}", file=sys.stderr)

    try:
        return asyncio.run(ask_store(config, asked, makes=makes)) or 0
    except NotFound as error:
        return fail(str(error.args[0]))
    except NameInUse as error:
        return fail(f"{error}: {error.account_id}; choose another name, or rename that one: `hearth accounts rename`")
    except (StoreUnavailable, Conflict, ValueError) as error:
        return fail(str(error))


def _os_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        return str(os.getuid())
