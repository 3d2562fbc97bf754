"""The small version of benchmarks/gateway/hostile_clients.py: legitimate requests go on under attack."""

from pathlib import Path
from typing import Any

import pytest

from tenants.records.limits import Limits
from tests.support.certificates import trusting, write_certificate
from tests.support.hostile_clients import besieged, go_on
from tests.support.served_gateway import looped, served
from tests.support.waiting import until

UNLIMITED = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


@pytest.mark.parametrize("tls", [False, True])
def test_hundreds_of_hostile_connections_do_not_keep_the_others_out(tmp_path: Path, tls: bool) -> None:
    """More than there is room for, if one address could have it all; and each holds its place as long as it can."""

    @looped
    async def call() -> None:
        secure: dict[str, Any] = write_certificate(tmp_path) if tls else {}
        context = trusting(secure["certificate"]) if tls else None
        settings = {"connections": 260, "address_connections": 200, "header_s": 2, "body_s": 2, "blocked_s": 2}
        async with served(tmp_path, limits=UNLIMITED, **settings, **secure) as gateway:
            listener = gateway.server._listener
            async with besieged(gateway.port, source="127.0.0.2", connections=300, tls=tls):
                await until(lambda: listener._connections_of["127.0.0.2"] > 100, 10)  # TLS begins slowly on busy cores
                fared = await go_on(gateway, context, clients=8, seconds=4)
            assert len(fared.seconds) > 50
            assert fared.failures == []
            await until(lambda: not listener.connections, 10)  # whoever was cut off, or killed, has left nothing
            await gateway.settled()
            assert not gateway.server.server_state.connections

    call()
