"""The small version of benchmarks/gateway/early_disconnects.py."""

from pathlib import Path

from tenants.records.limits import Limits
from tests.support.early_disconnects import Held, leaving
from tests.support.served_gateway import looped, served

UNLIMITED = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


@looped
async def test_streams_that_are_left_early_leave_nothing_and_their_blocks_are_free_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, limits=UNLIMITED) as gateway:
        await leaving(gateway, range(1, 101), per_second=100, share=0.3)
        before = Held.now(gateway)
        waited_ms = await leaving(gateway, range(1000, 2000), per_second=100, share=0.3)
        after = Held.now(gateway)
        assert len(waited_ms) > 200
        assert waited_ms[len(waited_ms) // 2] <= 50
        assert waited_ms[len(waited_ms) * 99 // 100] <= 500
        assert after.requests == after.holds == after.sequences == after.connections == 0
        assert after.tasks <= before.tasks
        assert after.descriptors <= before.descriptors + 1
        assert after.memory_bytes <= before.memory_bytes + (16 << 20)
