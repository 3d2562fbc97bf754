"""What the operator sees of the fleet."""

import asyncio
from pathlib import Path

from tests.support.admin_api import served_admin
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL
from tests.support.waiting import until


@looped
async def test_replicas_and_requests_without_a_word_of_text(tmp_path: Path) -> None:
    async with served_admin(tmp_path, replicas=2) as house:
        house.gateway.behaviour.step_s = 0.05
        running = asyncio.create_task(house.gateway.run(prompt="a secret word", max_tokens=60))
        await until(lambda: house.gateway.fleet.running)
        answer = await house.operate("GET", "/fleet")
        seen = answer.json["result"]
        assert (seen["open_requests"], seen["store_away"], seen["machines"]) == (1, False, {})
        assert [(one["model"], one["ready"], one["residency"]) for one in seen["replicas"]] == [
            (MODEL, True, "DEVICE")
        ] * 2
        assert b"secret" not in answer.content
        assert house.ann_id.encode() not in answer.content
        assert (await running).status == 200
