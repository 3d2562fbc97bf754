"""The exchange of a queued request: no client sends it, none waits for its answer."""

import asyncio
from collections.abc import Callable

from starlette.types import Message

from gateway.http.client_address import ClientAddress
from gateway.http.exchange import Exchange, ExchangeTimeouts


class BackgroundExchange(Exchange):
    """`content` is the body of the answer. `address` is the one that the request came from."""

    def __init__(self, request_id: str, clock: Callable[[], float], address: str) -> None:
        scope = {"method": "POST", "path": "", "query_string": b"", "headers": []}
        client, timeouts = ClientAddress(address, trusted=False), ExchangeTimeouts(0, 0, 0, 0)
        super().__init__(scope, self._silence, self._keep, timeouts, request_id, clock, client)
        self.content = b""

    async def _silence(self) -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def _keep(self, message: Message) -> None:
        self.content += message.get("body", b"")
