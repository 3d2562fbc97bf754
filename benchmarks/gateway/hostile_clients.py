"""A thousand hostile connections at once (slow and endless heads, silence, endless bodies, answers that nobody reads,
handshakes that do not go on) while others go on: how many of their requests succeed, and what the siege leaves.

    python -m benchmarks.gateway.hostile_clients [--connections 1000] [--seconds 60]

The gateway with its default limits, a stub replica and the legitimate clients are in this process; the attackers in
another, on the same cores. A request has failed that is refused, cut off, or takes more than ten seconds.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.record import record
from gateway.settings.server import ServerConfig
from tenants.records.limits import Limits
from tests.support.certificates import trusting, write_certificate
from tests.support.early_disconnects import Held
from tests.support.hostile_clients import besieged, go_on
from tests.support.served_gateway import served
from tests.support.waiting import until

CLIENTS: Final = 16
SUCCEED: Final = 0.999
UNLIMITED: Final = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


async def run(connections: int, seconds: float, tls: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        secure: dict[str, Any] = write_certificate(Path(name)) if tls else {}
        context = trusting(secure["certificate"]) if tls else None
        async with served(Path(name), limits=UNLIMITED, **secure) as gateway:
            alone = await go_on(gateway, context, CLIENTS, seconds / 6)
            before = Held.now(gateway)
            async with besieged(gateway.port, source="127.0.0.2", connections=connections, tls=tls):
                fared = await go_on(gateway, context, CLIENTS, seconds)
                during = Held.now(gateway)
            longest_s = max(ServerConfig().blocked_s, ServerConfig().body_s) + 5
            listener = gateway.server._listener
            assert listener is not None
            await until(lambda: not listener.connections, longest_s)
            await gateway.settled()
            after = Held.now(gateway)
    shape = f"{connections} hostile connections, {'TLS' if tls else 'plain'}: "
    print(f"{len(alone.seconds)} requests before, {len(fared.seconds)} in {seconds:g} s of siege", fared.failures[:5])
    record("edge", f"{shape}legitimate requests that succeed", round(fared.succeeded, 5), "of 1", bound=SUCCEED)
    waited = sorted(fared.seconds)
    for percent in (50, 99):
        record("edge", f"{shape}their time, p{percent}", round(waited[len(waited) * percent // 100] * 1e3, 1), "ms")
    record("edge", f"{shape}memory it takes", round((during.memory_bytes - before.memory_bytes) / (1 << 20), 1), "MiB")
    left = after.connections + after.requests + after.sequences + max(0, after.descriptors - before.descriptors)
    record("edge", f"{shape}connections, requests, descriptors left", left, "", bound=0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    for tls in (False, True):
        uvloop.run(run(options.connections, options.seconds, tls))
