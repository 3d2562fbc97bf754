"""Inference requests in progress: how many there may be, and what ends them before their time. It computes nothing.

What refuses a new request ends a running one: the same checks are asked again of all that run, every CHECK_S.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gateway import errors
from gateway.admission import check_model, check_region, check_rights
from gateway.authentication import Authenticator, credential_of
from gateway.catalogue.catalogue import Model
from gateway.errors import ApiError
from gateway.http.exchange import Exchange
from gateway.http.routes import Handler
from gateway.inference.lifecycle import InferenceCall
from tenants.auth.caller import Caller
from tenants.auth.errors import AccountSuspended, Unauthenticated, WrongRegion
from tenants.auth.issuers import IssuerUnavailable
from tenants.limits.quota import Quota
from tenants.limits.reservation import Overdrawn
from tenants.records.grants import Permission
from tenants.store.protocol import StoreUnavailable

CHECK_S: Final = 2.0
LOOK_UPS: Final = 64  # credentials that are looked up at once: an outage of the store delays no other's end

# Looks a caller up anew. Raises Unauthenticated, AccountSuspended and StoreUnavailable.
LookUp = Callable[[], Awaitable[Caller]]


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request that was let in, and the call that it became once it is known what it asks."""

    exchange: Exchange
    caller: Caller
    call: InferenceCall | None = None


class OpenRequestChecks:
    """Asks of running requests what is asked of new ones. All go on while the store is away. `calendar` is
    seconds since 1970. New ones of accounts that may not be served in this region are sent to `region_urls`."""

    def __init__(
        self, quota: Quota, calendar: Callable[[], float], region: str, region_urls: Mapping[str, str]
    ) -> None:
        self._quota = quota
        self._calendar = calendar
        self.region = region
        self.region_urls = region_urls
        self._look_ups = asyncio.Semaphore(LOOK_UPS)

    async def admit(self, look_up: LookUp, exchange: Exchange, model: Model) -> Caller:
        """The caller of a request that was accepted earlier and begins now. Raises ApiError and StoreUnavailable."""
        try:
            caller = await look_up()
        except (Unauthenticated, AccountSuspended, WrongRegion) as ended:
            raise _ended_error(ended) from None
        except IssuerUnavailable:
            raise errors.issuer_unavailable() from None
        _check_rights(caller, exchange)
        check_model(self.region, self._calendar(), caller, model, model.name)
        return caller

    async def end_refused(self, groups: Iterable[tuple[LookUp, Sequence[OpenRequest]]]) -> None:
        """Ends those that would be refused now, each with the refusal. A group is one caller's requests: it costs one
        look-up, and a second call of the store where the caller has changed."""
        async with asyncio.TaskGroup() as tasks:
            for look_up, requests in groups:
                tasks.create_task(self._check_group(look_up, requests))

    async def _check_group(self, look_up: LookUp, requests: Sequence[OpenRequest]) -> None:
        try:
            async with self._look_ups:
                caller = await look_up()
                changed = [request for request in requests if _must_check(request, caller)]
                overdrawn = await self._quota.overdrawn(caller) if changed else {}
        except StoreUnavailable:
            return
        except (Unauthenticated, AccountSuspended, WrongRegion) as ended:
            for request in requests:
                request.exchange.interrupt(_ended_error(ended))
            return
        for request in changed:
            try:
                self._check(request, caller, overdrawn)
            except ApiError as refusal:
                request.exchange.interrupt(refusal)
            await asyncio.sleep(0)

    def _check(self, request: OpenRequest, caller: Caller, overdrawn: Overdrawn) -> None:
        _check_rights(caller, request.exchange)
        if request.call is not None:
            request.call.check(caller, self._calendar(), overdrawn)
        request.caller = caller


def _check_rights(caller: Caller, exchange: Exchange) -> None:
    check_rights(caller, exchange, exchange.path_params.get("account_id"), (Permission.INFERENCE,))


def _ended_error(ended: Unauthenticated | AccountSuspended | WrongRegion) -> ApiError:
    """The refusal of a request whose credential was in force when it arrived."""
    if isinstance(ended, WrongRegion):
        return errors.wrong_region(ended.region, ended.allowed)
    return errors.suspended() if isinstance(ended, AccountSuspended) else errors.token_ended()


def _must_check(request: OpenRequest, caller: Caller) -> bool:
    """Whether its caller has changed since it was checked, or time may have ended what it asks for."""
    call = request.call
    return (request.caller if call is None else call.caller) != caller or (
        call is not None and call.model.ends_on is not None
    )


class OpenRequests:
    """At most `limit` requests at once; `on_change` gets how many there are."""

    def __init__(
        self, authenticator: Authenticator, checks: OpenRequestChecks, limit: int, on_change: Callable[[int], None]
    ) -> None:
        self._authenticator = authenticator
        self._checks = checks
        self._limit = limit
        self._on_change = on_change
        self._open: dict[Exchange, OpenRequest | None] = {}  # None until its caller is verified
        self.draining = False

    def __len__(self) -> int:
        return len(self._open)

    def by_account(self) -> Counter[str]:
        """How many each account has."""
        return Counter(request.caller.account.id for request in self._open.values() if request is not None)

    def handler(self, serve: Callable[[OpenRequest], Awaitable[None]]) -> Handler:
        """Builds a handler whose requests are open while it runs; while this gateway drains it refuses new ones."""

        async def handle(exchange: Exchange) -> None:
            if self.draining:
                raise errors.draining()
            if len(self) >= self._limit:
                raise errors.busy()
            account_id = exchange.path_params.get("account_id")
            self._open[exchange] = None
            self._on_change(len(self))
            try:
                caller = await self._authenticator.verify(exchange, account_id, (Permission.INFERENCE,))
                check_region(self._checks.region, caller)  # before a byte of the body is read
                self._open[exchange] = request = OpenRequest(exchange, caller)
                await serve(request)
            except ApiError as refusal:
                raise errors.redirected(refusal, self._checks.region_urls, exchange.path, exchange.query) from None
            finally:
                del self._open[exchange]
                self._on_change(len(self))

        return handle

    def end_all(self) -> None:
        """Ends all open requests, each with an error that says why."""
        for exchange in list(self._open):
            exchange.interrupt(errors.draining())

    async def end_refused(self) -> None:
        """Ends, for ever, requests that would be refused by now. Between two checks it refers to none of them: what is
        over is freed at once."""
        while True:
            await asyncio.sleep(CHECK_S)
            await self._checks.end_refused(self._by_caller())

    def _by_caller(self) -> list[tuple[LookUp, list[OpenRequest]]]:
        by_credential: defaultdict[str, list[OpenRequest]] = defaultdict(list)
        for request in self._open.values():
            if request is not None:
                by_credential[credential_of(request.exchange)].append(request)
        return [(partial(self._authenticator.look_up, key), requests) for key, requests in by_credential.items()]
