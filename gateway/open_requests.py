"""Inference requests in progress: how many there may be, and what ends them before their time. It computes nothing."""

import asyncio
from collections.abc import Callable
from typing import Final

from gateway import errors
from gateway.authentication import Authenticator, CallerHandler, credential_of
from gateway.http.exchange import Exchange
from gateway.http.routes import Handler
from tenants.records.grants import Permission
from tenants.store.protocol import StoreUnavailable

REVOCATION_CHECK_S: Final = 2.0  # how often the tokens of running requests are verified again


class OpenRequests:
    """At most `limit` requests at once; `on_change` gets how many there are."""

    def __init__(self, authenticator: Authenticator, limit: int, on_change: Callable[[int], None]) -> None:
        self._authenticator = authenticator
        self._limit = limit
        self._on_change = on_change
        self._credentials: dict[Exchange, str] = {}  # of each open request; "" until it is verified
        self.draining = False

    def __len__(self) -> int:
        return len(self._credentials)

    def handler(self, serve: CallerHandler) -> Handler:
        """Builds a handler whose requests are open while it runs; while this gateway drains it refuses new ones."""

        async def handle(exchange: Exchange) -> None:
            if self.draining:
                raise errors.draining()
            if len(self) >= self._limit:
                raise errors.busy()
            credential, account_id = credential_of(exchange), exchange.path_params.get("account_id")
            self._credentials[exchange] = ""
            self._on_change(len(self))
            try:
                caller = await self._authenticator.verify(exchange, account_id, (Permission.INFERENCE,))
                self._credentials[exchange] = credential
                await serve(exchange, caller)
            finally:
                del self._credentials[exchange]
                self._on_change(len(self))

        return handle

    def end_all(self) -> None:
        """Ends all open requests, each with an error that says why."""
        for exchange in list(self._credentials):
            exchange.interrupt(errors.draining())

    async def end_revoked(self) -> None:
        """Ends, for ever, requests whose token was revoked or has expired. All go on while the store is away."""
        while True:
            await asyncio.sleep(REVOCATION_CHECK_S)
            for credential in set(self._credentials.values()) - {""}:
                try:
                    ended = await self._authenticator.has_ended(credential)
                except StoreUnavailable:
                    break
                for exchange, used in list(self._credentials.items()):
                    if ended and used == credential:
                        exchange.interrupt(errors.token_ended())
