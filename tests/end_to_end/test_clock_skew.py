"""Two gateways of one store whose clocks are two hours apart: what an account may use is one thing for both."""

from pathlib import Path

from tenants.records.limits import Limits
from tests.support.redis_server import RedisServer
from tests.support.served_gateway import Answer, Served, looped, served
from tests.support.waiting import wait_for_a_day

HOUR_S = 3600.0
PER_MINUTE = 6
LIMITS = Limits(requests_per_minute=PER_MINUTE, burst=PER_MINUTE, neurons_per_day=1000.0, concurrent_requests=4)


async def asked(gateway: Served, token: str) -> Answer:
    """A call of the first gateway's account."""
    body = {"model": "@cf/test/stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return await gateway.call("/v1/chat/completions", body, authorization=f"Bearer {token}")


@looped
async def test_limits_and_the_ledger_go_by_the_store_s_clock(tmp_path: Path) -> None:
    wait_for_a_day()
    store = RedisServer(tmp_path)
    store.start()
    for name in ("ahead", "behind"):
        (tmp_path / name).mkdir()
    try:
        async with (
            served(tmp_path / "ahead", store_url=store.url, limits=LIMITS) as ahead,
            served(tmp_path / "behind", store_url=store.url, account_name="other") as behind,
        ):
            ahead.clock.offset_s, behind.clock.offset_s = HOUR_S, -HOUR_S
            answers = [await asked(gateway, ahead.token) for gateway in (ahead, behind) * (PER_MINUTE // 2)]
            assert {answer.status for answer in answers} == {200}
            for gateway in (ahead, behind):
                refused = await asked(gateway, ahead.token)
                assert refused.status == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 60 // PER_MINUTE + 1
            await ahead.settled()
            await behind.settled()
            await behind.quota.flush()
            ahead.clock.offset_s = 0.0
            records = await ahead.records()
            assert [record.outcome for record in records] == ["done"] * PER_MINUTE
            balance = await ahead.app._tenancy.store.quotas.reconcile(ahead.account_id, records[0].day)
            balance.check()
    finally:
        store.close()
