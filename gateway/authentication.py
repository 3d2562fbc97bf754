"""Authenticates callers: a request's credential against accounts, permissions and networks. It serves nothing."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway import errors
from gateway.admission import check_rights
from gateway.errors import ApiError
from gateway.http.client_address import address_group
from gateway.http.exchange import Exchange
from gateway.http.routes import Handler
from gateway.settings.server import ServerConfig
from tenants.auth.accounts import ACCOUNT_ID, NAME_MAX, AccountService
from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, HomeUnavailable, MalformedToken, Unauthenticated, WrongRegion
from tenants.auth.issuers import IssuerUnavailable
from tenants.limits.local_rate import LocalRate
from tenants.records.accounts import name_key
from tenants.records.grants import Permission
from tenants.store.protocol import StoreUnavailable

# Serves an exchange of a caller that may use the path. Raises ApiError and ClientDisconnected.
CallerHandler = Callable[[Exchange, Caller], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Authenticator:
    """Verifies callers with the accounts; `on_outage` gets the problem when their store does not answer.

    `failures` counts credentials that opened nothing, by the address that they came from. Whoever shares that address
    and has a good one is served all the same: nothing is refused before it is verified.
    """

    accounts: AccountService
    on_outage: Callable[[StoreUnavailable], None]
    failures: LocalRate

    @classmethod
    def of(
        cls,
        accounts: AccountService,
        on_outage: Callable[[StoreUnavailable], None],
        limits: ServerConfig,
        clock: Callable[[], float],
    ) -> "Authenticator":
        """`clock` is monotonic seconds."""
        return cls(accounts, on_outage, LocalRate(limits.address_failures / 60, limits.address_failures, clock))

    async def verify(self, exchange: Exchange, account_id: str | None, permissions: Sequence[Permission]) -> Caller:
        """Returns the caller, who has one of these permissions if there are any. Raises ApiError.

        A path that names another account than the token's is refused, whether that account exists or not. One that has
        the account's name gets its id in place of it: a stream goes on when its account is renamed.
        """
        try:
            caller = await self.look_up(credential_of(exchange))
        except MalformedToken:
            raise self._failed(exchange, errors.malformed_token()) from None
        except Unauthenticated:
            raise self._failed(exchange, errors.unauthenticated()) from None
        except AccountSuspended:
            raise errors.suspended() from None
        except IssuerUnavailable:
            raise errors.issuer_unavailable() from None
        except WrongRegion as refusal:
            raise errors.wrong_region(refusal.region, refusal.allowed) from None
        except HomeUnavailable:
            raise errors.home_unavailable() from None
        except StoreUnavailable:
            raise errors.store_unavailable() from None
        exchange.account_id, exchange.token_id = caller.account.id, caller.token_id
        if account_id is not None and ACCOUNT_ID.fullmatch(account_id) is None:
            account_id = exchange.path_params["account_id"] = _own_id(caller, account_id, exchange.path)
        check_rights(caller, exchange, account_id, permissions)
        return caller

    def _failed(self, exchange: Exchange, refusal: ApiError) -> ApiError:
        """Counts a failure; returns the refusal, or that of an address that had too many."""
        wait_s = self.failures.take(address_group(exchange.client.address))
        return errors.too_many_failures(math.ceil(wait_s)) if wait_s else refusal

    async def look_up(self, credential: str) -> Caller:
        """Returns the caller that a credential stands for now. Raises Unauthenticated, AccountSuspended and
        StoreUnavailable."""
        try:
            return await self.accounts.verify(credential)
        except (IssuerUnavailable, HomeUnavailable):
            raise
        except StoreUnavailable as problem:
            self.on_outage(problem)
            raise

    def permitted(self, serve: CallerHandler, *permissions: Permission) -> Handler:
        """Builds a handler for callers of the path's account that have one of these permissions."""

        async def handler(exchange: Exchange) -> None:
            await serve(exchange, await self.verify(exchange, exchange.path_params.get("account_id"), permissions))

        return handler


def _own_id(caller: Caller, name: str, path: str) -> str:
    """Returns the id of the caller's account, whose name this is. The caller's own name alone is looked at, so that an
    answer tells nothing of others'. Raises ApiError."""
    if len(name) > NAME_MAX or name_key(name) != name_key(caller.account.name):
        raise errors.bad_account_id(path)
    return caller.account.id


async def no_route_below_account(exchange: Exchange) -> None:
    """Refuses every request, one whose path has no id of an account for that. Raises ApiError."""
    account_id = exchange.path_params.get("account_id")
    if account_id is not None and ACCOUNT_ID.fullmatch(account_id) is None:
        raise errors.bad_account_id(exchange.path)
    raise errors.no_route(exchange.path)


def credential_of(exchange: Exchange) -> str:
    """Returns the bearer token of a request; without Authorization its x-api-key, under every path. Raises ApiError if
    there is neither."""
    authorization = exchange.headers.get(b"authorization")
    if authorization is None and (key := exchange.headers.get(b"x-api-key")):
        return key.strip().decode("latin-1")
    scheme, _, credential = (authorization or b"").partition(b" ")
    if scheme.lower() != b"bearer":
        raise errors.unauthenticated()
    return credential.strip().decode("latin-1")
