"""The small version of benchmarks/gateway/early_disconnects.py."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from gateway.cluster.client import ReplicaConnection
from tenants.records.limits import Limits
from tests.support.early_disconnects import Held, leaving
from tests.support.served_gateway import looped, served

UNLIMITED = Limits(requests_per_minute=6_000_000, neurons_per_day=1e9, concurrent_requests=1_000_000)


def assert_prompt(waited_ms: list[float]) -> None:
    """Half of those that left were cancelled within 50 ms, and all but one in a hundred within 500."""
    assert waited_ms[len(waited_ms) // 2] <= 50
    assert waited_ms[len(waited_ms) * 99 // 100] <= 500


@looped
async def test_streams_that_are_left_early_leave_nothing_and_their_blocks_are_free_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, limits=UNLIMITED) as gateway:
        await leaving(gateway, range(1, 101), per_second=100, share=0.3)
        before = Held.now(gateway)
        waited_ms = await leaving(gateway, range(1000, 2000), per_second=100, share=0.3)
        after = Held.now(gateway)
        assert len(waited_ms) > 200
        assert_prompt(waited_ms)
        assert after.requests == after.holds == after.sequences == after.connections == 0
        assert after.tasks <= before.tasks
        assert after.descriptors <= before.descriptors + 1
        assert after.memory_bytes <= before.memory_bytes + (16 << 20)


BREAKS = {
    "each is told a tenth of a second late": lambda left: 0.1,
    "one in thirty is told late": lambda left: 0.7 * (left % 30 == 0),
}


@pytest.mark.parametrize("name", BREAKS)
@looped
async def test_the_bounds_fail_where_leaving_is_told_late(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop, left = ReplicaConnection._drop, 0

    def late(self: ReplicaConnection, ids: Iterable[int]) -> int:
        nonlocal left
        left += 1
        known = [id for id in ids if id in self._streams]
        asyncio.get_running_loop().call_later(BREAKS[name](left), drop, self, known)
        return len(known)

    monkeypatch.setattr(ReplicaConnection, "_drop", late)
    async with served(tmp_path, limits=UNLIMITED) as gateway:
        waited_ms = await leaving(gateway, range(1, 301), per_second=100, share=0.5)
    assert len(waited_ms) > 100
    with pytest.raises(AssertionError):
        assert_prompt(waited_ms)
