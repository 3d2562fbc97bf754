"""The operator's plans."""

import asyncio
from pathlib import Path

from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped


@looped
async def test_a_plans_life(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        content = {"limits": {"requests_per_minute": 5}, "weight": 2, "floor_blocks": 3, "cap_blocks": 9}
        made = await house.operate("PUT", "/plans/free", content, if_none_match="*")
        assert (made.headers["etag"], made.json["result"]["weight"]) == ('"1"', 2)
        assert (await house.operate("PUT", "/plans/free", content, if_none_match="*")).status == 412
        assert (await house.operate("GET", "/plans/free")).json == made.json
        names = [plan["name"] for plan in (await house.operate("GET", "/plans")).json["result"]]
        assert names == ["default", "free"]

        await house.operate("PATCH", f"/accounts/{house.ann_id}", {"plan": "free"})
        changed = await house.operate("PUT", "/plans/free", {"limits": {"requests_per_minute": 1}}, if_match='"1"')
        assert (changed.json["result"]["revision"], changed.json["result"]["weight"]) == (2, 1)
        house.gateway.see_changes()
        ran = [await house.gateway.run(prompt="hello", max_tokens=1) for _ in range(2)]
        assert [one.status for one in ran] == [200, 429]

        held = await house.operate("DELETE", "/plans/free")
        assert (held.status, held.code) == (409, 1009)
        assert house.ann_id in held.message
        await house.operate("PATCH", f"/accounts/{house.ann_id}", {"plan": "default"})
        assert (await house.operate("DELETE", "/plans/free")).json["result"] == {"name": "free"}
        for method in ("GET", "DELETE"):
            assert (await house.operate(method, "/plans/free")).code == 1003
        entries = [(action, target) for _, action, target in await house.audited("")]
        assert entries == [("plan.change", "free")] * 2 + [("plan.remove", "free")]


@looped
async def test_the_default_plan_has_its_first_content_again_and_is_not_removed(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        first = (await house.operate("GET", "/plans/default")).json
        await house.operate("PUT", "/plans/default", {"weight": 3})
        assert (await house.operate("DELETE", "/plans/default")).status == 200
        assert (await house.operate("GET", "/plans/default")).json == first
        refused = await house.operate("DELETE", "/plans/default")
        assert (refused.status, refused.code) == (409, 1009)
        assert "the plan default is always there" in refused.message


@looped
async def test_two_writers_of_a_plan_lose_nothing(tmp_path: Path, store_url: str) -> None:
    async with served_admin(tmp_path, store_url=store_url) as house:
        await house.operate("PUT", "/plans/free", {"weight": 1})

        async def add() -> None:
            while True:
                read = await house.operate("GET", "/plans/free")
                content = {"weight": read.json["result"]["weight"] + 1}
                answer = await house.operate("PUT", "/plans/free", content, if_match=read.headers["etag"])
                if answer.status == 200:
                    return
                assert answer.status == 412

        await asyncio.gather(*(add() for _ in range(6)))
        assert (await house.operate("GET", "/plans/free")).json["result"]["weight"] == 7


@looped
async def test_a_wrong_plan_is_refused(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        for content in (
            {"name": "free"}, {"revision": 3}, {"weight": 0}, {"weight": "2"}, {"floor_blocks": 9, "cap_blocks": 3},
            {"limits": {"classes": {"BIG": {}}}}, {"sequences": -1}, {"wait_s": 0},
        ):  # fmt: skip
            assert (await house.operate("PUT", "/plans/free", content)).status == 400, content
        assert (await house.operate("PUT", "/plans/FREE", {})).status == 404
        assert len(await house.gateway.accounts.plans()) == 1
