"""A host that comes and goes each second: its streams go on elsewhere, none is lost, and soon it gets no more."""

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import WORDS, StubFleet
from tests.support.waiting import forever

PERIOD_S: Final = 1.0  # it is there so long, and then away as long
FLAPPING_S: Final = 24.0
LEARNED_S: Final = 12.0  # it was lost often enough by then, whatever else this machine does
CLIENTS: Final = 12
TOKENS: Final = 40
STEP_S: Final = 0.02


@dataclass
class Crowd:
    """Clients that call again and again. `complaints` are of answers that are not what they have to be."""

    gateway: Served
    complaints: list[str] = field(default_factory=list)
    calls: int = 0

    async def call(self, number: int) -> None:
        body: dict[str, Any] = {"prompt": f"prompt {number}", "max_tokens": TOKENS, "stream": bool(number % 2)}
        answer = await self.gateway.run(**body)
        self.calls += 1
        if answer.status != 200:
            self.complaints.append(f"{number}: status {answer.status}, {answer.content!r}")
        elif number % 2:
            errors = [event for event in answer.events if isinstance(event, dict) and event.get("errors")]
            texts = [event for event in answer.events if isinstance(event, dict) and event.get("response")]
            if errors or len(texts) != TOKENS or answer.events[-1] != "[DONE]":
                self.complaints.append(f"{number}: {len(texts)} of {TOKENS} tokens, {errors}")
        elif answer.json["result"]["usage"]["completion_tokens"] != TOKENS:
            self.complaints.append(f"{number}: {answer.json}")

    async def come(self, client: int, until_s: float) -> None:
        number = client
        while time.monotonic() < until_s:
            await self.call(number)
            number += CLIENTS


async def flap(fleet: StubFleet, until_s: float) -> None:
    """The host is up and down in turn, and down in the end."""
    while time.monotonic() < until_s:
        async with fleet.serving():
            await pause()
        await pause()


async def pause() -> None:
    try:
        async with asyncio.timeout(PERIOD_S):
            await forever()
    except TimeoutError:
        return


def host(folder: Path, name: str) -> StubFleet:
    (folder / name).mkdir()
    made = StubFleet(folder / name)
    made.behaviour.step_s, made.behaviour.words = STEP_S, list(WORDS)
    return made


@looped
async def test_a_host_that_flaps_costs_no_call_and_soon_gets_none(tmp_path: Path) -> None:
    steady, other, flapping = (host(tmp_path, name) for name in ("steady", "other", "flapping"))
    machines = [fleet.address for fleet in (steady, other, flapping)]
    async with steady.serving(), other.serving(), served(tmp_path, machines=machines) as gateway:
        crowd, began_s = Crowd(gateway), time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(flap(flapping, began_s + FLAPPING_S))
            for client in range(CLIENTS):
                group.create_task(crowd.come(client, began_s + FLAPPING_S))
            learning = asyncio.timeout(LEARNED_S)
            try:
                async with learning:
                    await forever()
            except TimeoutError:
                early = len(flapping.submits)
        late = len(flapping.submits) - early
        await gateway.settled()
        records = await gateway.records()
    assert crowd.complaints == []
    assert early, "it had calls as long as it was not known to flap"
    assert late == 0, "it had calls when it was"
    assert len(records) == crowd.calls
    assert {(record.outcome, record.completion_tokens) for record in records} == {("done", TOKENS)}
    assert not any(fleet.wakes for fleet in (steady, other, flapping)), "nobody was to wake what serves"
