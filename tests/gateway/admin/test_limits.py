"""Own limits below a ceiling, and what is left of those in force."""

from pathlib import Path
from typing import Any

import pytest

from tenants.records.grants import Permission
from tenants.records.limits import Limits
from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped


@looped
async def test_an_administrator_lowers_limits_and_they_hold(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        answer = await house.ask("PUT", f"{house.account}/limits", {"requests_per_minute": 1}, if_match='"1"')
        assert answer.json["result"]["own"] == {"requests_per_minute": 1}
        assert answer.json["result"]["in_force"]["requests_per_minute"] == 1
        assert answer.json["result"]["most"]["requests_per_minute"] == 1200
        house.gateway.see_changes()
        ran = [await house.gateway.run(prompt="hello", max_tokens=1) for _ in range(2)]
        assert [one.status for one in ran] == [200, 429]
        again = await house.ask("PUT", f"{house.account}/limits", {})
        assert again.json["result"]["in_force"] == again.json["result"]["most"]
        assert (await house.ask("GET", f"{house.account}/limits")).json == again.json
        assert [action for _, action, _ in await house.audited(house.ann_id)] == ["account.own_limits"] * 2


ABOVE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"requests_per_minute": 101}, ("'requests_per_minute'", "101", "100")),
    ({"requests_per_minute": 100, "burst": 11}, ("'burst'", "11", "10")),
    ({"neurons_per_day": 5.5}, ("'neurons_per_day'", "5.5", "5.0")),
    ({"classes": {"large": {"concurrent_requests": 3}}}, ("'classes.large.concurrent_requests'", "3", "2")),
]
IMPOSSIBLE: list[dict[str, Any]] = [
    {"requests_per_minute": -1}, {"requests_per_minute": 1.0}, {"speed": 1}, {"burst": 2}, {"neurons_per_day": 1e300},
    {"classes": {"A": {}}}, {"classes": {"a": {"classes": {"b": {}}}}},
]  # fmt: skip


@looped
async def test_an_own_limit_above_its_ceiling_is_refused_with_both(tmp_path: Path) -> None:
    ceiling = Limits(
        requests_per_minute=100, burst=10, neurons_per_day=5.0, classes={"large": Limits(concurrent_requests=2)}
    )
    async with served_admin(tmp_path, limits=ceiling) as house:
        for own, named in ABOVE:
            answer = await house.ask("PUT", f"{house.account}/limits", own)
            assert answer.status == 400
            assert all(word in answer.message for word in named), answer.message
        for own in IMPOSSIBLE:
            assert (await house.ask("PUT", f"{house.account}/limits", own)).status == 400, own
        assert (await house.gateway.accounts.get(house.ann_id)).own.empty
        free = {"input_tokens_per_minute": 7, "classes": {"small": {"requests_per_minute": 5}}}
        assert (await house.ask("PUT", f"{house.account}/limits", free)).status == 200


@looped
async def test_what_is_left_counts_down(tmp_path: Path, store_url: str) -> None:
    limits = Limits(neurons_per_day=10.0, requests_per_minute=60, concurrent_requests=4)
    async with served_admin(tmp_path, limits=limits, store_url=store_url) as house:
        reader = await house.token(Permission.USAGE_READ, Permission.INFERENCE, limits=Limits(neurons_per_day=3.0))
        ran = await house.gateway.call(
            house.gateway.run_path, {"prompt": "hello", "max_tokens": 2}, authorization=f"Bearer {reader}"
        )
        await house.gateway.quota.flush()
        neurons = ran.json["result"]["usage"]["neurons"]
        left = (await house.ask("GET", f"{house.account}/limits/left", token=reader)).json["result"]
        by_name = {one["name"]: one for one in left}
        assert by_name["neurons-per-day"]["left"] == pytest.approx(10.0 - neurons)
        assert by_name["token-neurons-per-day"]["left"] == pytest.approx(3.0 - neurons)
        assert by_name["token-neurons-per-day"]["token"] == reader.split("_")[1]
        assert by_name["requests-per-minute"]["left"] == 59
        assert by_name["concurrent-requests"] == {
            "name": "concurrent-requests", "limit": "concurrent_requests", "token": None, "model_class": None,
            "allowed": 4, "left": 4, "reset_s": 0,
        }  # fmt: skip
        named = f"{house.account}/limits/left?token={reader.split('_')[1]}"
        assert [one["name"] for one in (await house.ask("GET", named)).json["result"]] == list(by_name)
        own = (await house.ask("GET", f"{house.account}/limits/left")).json["result"]
        assert [one["name"] for one in own] == [name for name in by_name if not name.startswith("token-")]
