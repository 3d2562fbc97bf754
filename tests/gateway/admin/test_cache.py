"""What the cache had of an account's prompts, and its purge."""

from pathlib import Path

import pytest

from tenants.records.grants import Permission
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped


@looped
async def test_statistics_are_those_of_usage_and_a_purge_begins_an_epoch(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        before = (await house.ask("GET", f"{house.account}/cache")).json["result"]
        assert before == {
            "epoch": 0, "scope": "tenant", "keep_s": None, "requests": 0, "prompt_tokens": 0, "cached_tokens": 0,
            "hit_ratio": None,
        }  # fmt: skip
        await house.gateway.run(prompt="hello", max_tokens=1)
        house.gateway.behaviour.cached_tokens = 4
        await house.gateway.run(prompt="hello", max_tokens=1)
        await house.gateway.quota.flush()
        reader = await house.token(Permission.USAGE_READ)
        after = (await house.ask("GET", f"{house.account}/cache", token=reader)).json["result"]
        assert (after["requests"], after["cached_tokens"]) == (2, 4)
        assert after["hit_ratio"] == pytest.approx(4 / after["prompt_tokens"])
        assert (await house.ask("POST", f"{house.account}/cache/purge", token=reader)).status == 403
        assert (await house.ask("POST", f"{house.account}/cache/purge")).json["result"] == {"epoch": 1}
        house.gateway.see_changes()
        await house.gateway.run(prompt="hello", max_tokens=1)
        scopes = [submit.scope.epoch for submit in house.gateway.fleet.submits]
        assert scopes == [0, 0, 1]
        assert [action for _, action, _ in await house.audited(house.ann_id)] == ["account.purge_cache"]


@looped
async def test_zero_retention_keeps_cached_prefixes_five_minutes_at_most(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        await house.ask("PATCH", house.account, {"settings": {"zero_retention": True, "cache_keep_s": 900}})
        assert (await house.ask("GET", f"{house.account}/cache")).json["result"]["keep_s"] == 300
