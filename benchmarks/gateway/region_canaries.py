"""Whether anything of a call leaves the regions that its account has: calls of a bound account, each with a text of its
own, in two cells of real processes in network namespaces, with a gateway and a machine of the other region set wrongly.

Counted are texts that are found in the other region: in packets on its links, in files (stores, logs, traces), and in
the memory of its processes. Calls of an account without regions, the control, are found there, or the figure is void.
"""

import argparse
import asyncio
import contextlib
import itertools
import math
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.record import record
from tests.end_to_end.canary import Canaries
from tests.support.network import NetworkHost, captured
from tests.support.region_world import MODEL, PORT, Answered, RegionWorld, call, letters, make_canaries, region_world

NAME: Final = "hosts"
AT_ONCE: Final = 16
BATCH: Final = 10  # requests that are queued together
TRIES: Final = 8
AGAIN_S: Final = 1.0
LET_IN_S: Final = 5.0  # for a call that the outside gateway takes, and that nobody there can answer
ANSWERED_MIN: Final = 0.9  # of plain calls; the rest may meet a killed replica or a busy moment


class RegionCrowd:
    """Calls of one account, each with a text of its own. `unexpected` are answers that none of them should get."""

    def __init__(self, world: RegionWorld, canaries: Canaries, token: str, *, bound: bool) -> None:
        self._world = world
        self._canaries = canaries
        self._token = token
        self._bound = bound
        self._dice = random.Random(7)
        self._numbers = itertools.count()
        self.made = 0
        self.statuses: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self._kills_at: set[int] = set()

    async def run(self, calls: int, limit_s: float) -> None:
        """So many texts, in all ways in which calls go and fail; those that are bound while replicas are killed."""
        self._kills_at = {min(calls // 3, 100), 2 * calls // 3} if self._bound else set()
        kinds = [self._plain, self._stream, self._batch, self._error, self._again, self._elsewhere]
        ends_s, weights = time.monotonic() + limit_s, (40, 15, 2, 8, 10, 25)

        async def work() -> None:
            while self.made < calls and time.monotonic() < ends_s:
                (kind,) = self._dice.choices(kinds, weights)
                try:
                    await kind()
                except (OSError, asyncio.IncompleteReadError) as error:  # a TimeoutError too
                    self.statuses[f"{kind.__name__} {type(error).__name__}"] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())

    async def _call(self, host: NetworkHost, token: str, path: str, body: dict[str, Any], **headers: str) -> Answered:
        """One call, and the same again while a limit, a lost replica or a late store refuses it."""
        for _ in range(TRIES):
            answered = await call(host, token, path, body, **headers)
            if answered.status not in (429, 500, 503):
                break
            self.statuses[f"tried again {answered.status}"] += 1
            await asyncio.sleep(AGAIN_S)
        return answered

    def _text(self) -> str:
        self.made += 1
        if self.made in self._kills_at:
            self._world.kill_a_replica()
        return f"so {self._canaries.text(letters(next(self._numbers)))} {self._dice.randrange(1 << 30)}"

    def _note(self, kind: str, answered: Answered, *expected: int) -> None:
        self.statuses[f"{kind} {answered.status}"] += 1
        if answered.status not in (*expected, 429, 500, 503):
            self.unexpected.append(f"{kind}: {answered.status} {answered.body[:200]}")

    async def _plain(self, host: NetworkHost | None = None) -> None:
        body = {"prompt": self._text(), "max_tokens": 2}
        self._note("plain", await self._call(host or self._world.inside, self._token, f"/ai/run/{MODEL}", body), 200)

    async def _stream(self) -> None:
        messages = [{"role": "user", "content": self._text()}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": True}
        self._note("stream", await self._call(self._world.inside, self._token, "/v1/chat/completions", body), 200)

    async def _batch(self) -> None:
        body = {"requests": [{"prompt": self._text(), "max_tokens": 2} for _ in range(BATCH)]}
        path = f"/ai/run/{MODEL}?queueRequest=true"
        self._note("batch", await self._call(self._world.inside, self._token, path, body), 200, 202)

    async def _error(self) -> None:
        text = self._text()
        body = self._dice.choice(
            [{"prompt": text, "max_tokens": text}, {"prompt": text, text.split()[1]: 1}, {"model": text}]
        )
        self._note("error", await self._call(self._world.inside, self._token, f"/ai/run/{MODEL}", body), 400)

    async def _again(self) -> None:
        body, key = {"prompt": self._text(), "max_tokens": 2}, f"key-{self.made}"
        for _ in range(2):
            headers = {"idempotency-key": key}
            answered = await self._call(self._world.inside, self._token, f"/ai/run/{MODEL}", body, **headers)
            self._note("again", answered, 200, 409)

    async def _elsewhere(self) -> None:
        """At the outside gateway. Who is bound is sent home before the body left; others send it there."""
        query = self._dice.choice(["", "?queueRequest=true"])
        prompt = {"prompt": self._text(), "max_tokens": 2}
        body = {"requests": [prompt]} if query else prompt
        path = f"/ai/run/{MODEL}{query}"
        if not self._bound:  # no machine of the outside cell answers
            self.statuses["let in elsewhere"] += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LET_IN_S):
                    await call(self._world.outside, self._token, path, body, expect="100-continue")
            return
        answered = await self._call(self._world.outside, self._token, path, body, expect="100-continue")
        self._note("elsewhere", answered, 307)
        location = answered.headers.get("location", "")
        if answered.sent or (
            answered.status == 307 and location != f"http://{self._world.inside.address}:{PORT}{path}"
        ):
            self.unexpected.append(f"elsewhere: sent {answered.sent}, {location}")
        if answered.status == 307:
            followed = await self._call(self._world.inside, self._token, path, body)
            self._note("followed", followed, 200, 202)


@dataclass(frozen=True)
class RegionFindings:
    """What was found of bound accounts' texts and, as the control, of others'."""

    calls: int
    bound: Counter[str]
    control: Counter[str]
    statuses: Counter[str]
    unexpected: list[str]
    packets: int


def look_for_canaries(folder: Path, calls: int, control_calls: int, limit_s: float) -> RegionFindings:
    """Runs both crowds in a world of their own, one after the other, and then looks outside. After limit_s no bound
    call begins."""
    bound, control = make_canaries(1), make_canaries(2)
    with region_world(folder) as world, contextlib.ExitStack() as taps:
        wires = {host.link: taps.enter_context(captured(host.link)) for host in world.outsiders}
        crowd = RegionCrowd(world, bound, world.token, bound=True)
        asyncio.run(crowd.run(calls, limit_s))
        print(f"{crowd.made} bound texts", flush=True)
        other = RegionCrowd(world, control, world.free, bound=False)
        asyncio.run(other.run(control_calls, limit_s))
        seen, seen_control = world.seen(bound, wires), world.seen(control, wires)
        packets = min(wire.packets for wire in wires.values())
        return RegionFindings(
            crowd.made,
            seen,
            seen_control,
            crowd.statuses + other.statuses,
            crowd.unexpected + other.unexpected,
            packets,
        )


def complaints(findings: RegionFindings) -> list[str]:
    """Why the figure would say nothing."""
    statuses, control = findings.statuses, findings.control
    plain = sum(count for kind, count in statuses.items() if kind.startswith("plain"))
    missing = [f"no {kind}" for kind in ("stream 200", "error 400", "again 200", "elsewhere 307") if not statuses[kind]]
    if statuses["plain 200"] < ANSWERED_MIN * plain:
        missing.append(f"only {statuses['plain 200']} of {plain} plain calls were answered")
    if not any(statuses[f"batch {status}"] for status in (200, 202)):
        missing.append("no batch was taken")
    if not sum(count for place, count in control.items() if place.startswith("packets")):
        missing.append("the control is in no packet")
    if not control["memory of the machine"]:
        missing.append("the control is not in the machine's memory")
    return [*missing, *findings.unexpected[:10]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="texts of the bound account")
    parser.add_argument("--control", type=int, default=300, help="texts of the account without regions")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no bound call begins")
    asked = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        findings = look_for_canaries(Path(folder), asked.calls, asked.control, asked.limit)
    print(f"{findings.calls} texts in {time.monotonic() - began:.0f} s, {findings.packets} packets at least on a link")
    for name, counts in (("bound", findings.bound), ("control", findings.control), ("answers", findings.statuses)):
        print(name, dict(sorted(counts.items())))
    if problems := complaints(findings):
        raise SystemExit("\n".join(problems))
    shape = f"{findings.calls} calls"
    record(NAME, f"hosts-region-canaries: {shape}", findings.bound.total(), "count", bound=0)
    record(NAME, f"hosts-region-canaries-control: {asked.control} calls", findings.control.total(), "count")


if __name__ == "__main__":
    main()
