"""A call whose replicas fall silent, drain, refuse, die and come back: its whole way between the answer and the
connections, with replicas, chances and a time of the test's own, held to its promises after every step. And with stub
replicas behind a whole gateway.
"""

import asyncio
import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from engine.protocol import frames
from engine.protocol.types import FinishReason, RejectReason, Residency, SamplingParams, Scope
from gateway.cluster import stream
from gateway.cluster.client import ReplicaClient, ReplicaConnection
from gateway.cluster.fleet import NoReplicaAvailable
from gateway.cluster.stream import LAG_S, OutputDelta, ReplicaStream
from gateway.inference.pipeline import TextGeneration
from tests.gateway.cluster.test_moves import connection
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL, StubReplica
from tests.support.waiting import in_fake_time, until

TOKENS: Final = 30
SEEDS: Final = 60


def token(choice: int, position: int) -> int:
    return 1000 * (choice + 1) + position


async def passes(seconds: float) -> None:
    """So much of the loop's own time passes, which nobody waits for."""
    loop = asyncio.get_running_loop()
    passed = loop.create_future()
    timer = loop.call_later(seconds, passed.set_result, None)
    try:
        await passed
    finally:
        timer.cancel()


@dataclass
class Running:
    """A sequence at a replica: its prompt is computed in so many `turns`."""

    choice: int
    position: int
    turns: int
    started: bool = False


class ChanceReplica:
    """A replica behind the gateway's real connection. `frozen`: it takes and says nothing; `closed`: no new call goes
    there, since it was found silent; it `drains`."""

    def __init__(self, name: str, dice: random.Random, ends: dict[int, int]) -> None:
        self.name, self.dice, self.ends = name, dice, ends
        self.connect()

    def connect(self) -> None:
        self.connection, self._wire = connection(f"unix:/{self.name}", handover="")
        self.running: dict[int, Running] = {}
        self.frozen = self.closed = self.drains = False

    @property
    def takes(self) -> bool:
        return not (self.closed or self.drains)

    def turn(self, refuses: float) -> None:
        """Takes what was sent, and computes one step."""
        if self.frozen:
            return
        sent, self._wire.sent = self._wire.sent, []
        self.connection.received_s = time.monotonic() + self.dice.choice((0.0, 2 * LAG_S))
        for frame in sent:
            if isinstance(frame, frames.Cancel):
                for id in frame.ids:
                    self.running.pop(id, None)
            elif isinstance(frame, frames.Submit) and (self.drains or self.dice.random() < refuses):
                reason = RejectReason.DRAINING if self.drains else RejectReason.BUSY
                self.connection.receive(frames.Reject(frame.id, reason, "", 100))
            elif isinstance(frame, frames.Submit):
                given = frame.given or [frames.GivenTokens(choice, b"") for choice in range(frame.n)]
                for index, each in enumerate(given):
                    running = Running(each.choice, len(each.tokens) // 4, self.dice.randrange(6))
                    self.running[frame.id + index] = running
        self._step()

    def fail(self) -> None:
        """All that runs here ends with an error."""
        finished = [frames.SequenceFinished(id, FinishReason.ERROR, 0, "by chance") for id in self.running]
        self.running.clear()
        self.connection.receive(frames.StepOutputs([], [], b"", finished=finished))

    def _step(self) -> None:
        counts, tokens, started, finished = dict[int, int](), list[int](), [], []
        for id, each in [*self.running.items()]:
            if not each.started and self.dice.random() < 0.5:
                each.started = True
                started.append(frames.SequenceStarted(id, 0, 0.0))
            each.turns -= 1
            if each.turns > 0:
                continue
            if not each.started:
                each.started = True
                started.append(frames.SequenceStarted(id, 0, 0.0))
            end = self.ends[each.choice]
            gained = [token(each.choice, each.position + i) for i in range(self.dice.randint(1, 3))]
            gained = gained[: end - each.position]
            each.position += len(gained)
            counts[id] = len(gained)
            tokens += gained
            if each.position == end:
                reason = FinishReason.LENGTH if end == TOKENS else FinishReason.STOP
                finished.append(frames.SequenceFinished(id, reason, end))
                del self.running[id]
        packed = array("I", tokens).tobytes()
        self.connection.receive(frames.StepOutputs([*counts], [*counts.values()], packed, started, finished))


class CountedChoice:
    """A completion without text, which a stop string ends at `stops_at` tokens, if one does."""

    def __init__(self, stops_at: int | None) -> None:
        self.tokens = array("I")
        self.finish: str | None = None
        self.last: OutputDelta | None = None
        self._stops_at = stops_at

    def push(self, step: OutputDelta) -> list[Any]:
        self.tokens.extend(step.tokens)
        if self._stops_at is not None and len(self.tokens) >= self._stops_at:
            self.finish = "stop string"
        elif step.finish is not None:
            self.finish = str(step.finish.reason)
        if self.finish is not None:
            self.last = step
        return []


class World:
    """One call and three replicas. It is the fleet from which the call acquires them, and the sink of its answer."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        n = dice.choice((1, 1, 3))
        self.ends = {choice: dice.choice((TOKENS, TOKENS, dice.randrange(4, TOKENS))) for choice in range(n)}
        self.replicas = [ChanceReplica(name, dice, self.ends) for name in "abc"]
        self.refuses = dice.choice((0.0, 0.0, 0.4))
        self.patience = 300  # turns in which things go wrong
        prompt: Any = SimpleNamespace(n=n, grammar=None, images=[])
        self.work = TextGeneration(prompt, SimpleNamespace())  # type: ignore[arg-type]
        self.stops_at = {choice: dice.choice((None, None, dice.randrange(1, TOKENS))) for choice in range(n)}
        self.work.choices = [CountedChoice(self.stops_at[choice]) for choice in range(n)]  # type: ignore[misc]
        options = SimpleNamespace(session=b"", background=False, reject_if_busy=False, timeout_ms=None)
        account = SimpleNamespace(plan=SimpleNamespace(weight=1.0, wait_s=None))
        self.call: Any = SimpleNamespace(
            context=SimpleNamespace(fleet=self, limits=SimpleNamespace(wait_s=900.0)),
            model=SimpleNamespace(name="m"), options=options, regions=(), caller=SimpleNamespace(account=account),
            left_s=lambda: 900.0, note_loss=self._note_loss,
        )  # fmt: skip
        self.order = frames.Submit(0, b"\1\0\0\0", Scope(), SamplingParams(), TOKENS, n=n)

    # What the call knows of it

    async def acquire(self, *args: Any, besides: object = None, **named: Any) -> ReplicaClient:
        deadline = args[3]
        while True:
            able = [each for each in self.replicas if each.takes and each.connection is not besides]
            if able:
                return ReplicaClient(self.dice.choice(able).connection, 0.0, None)
            if asyncio.get_running_loop().time() >= deadline:
                raise NoReplicaAvailable("nobody is there", True)
            await passes(0.05)

    async def _note_loss(self, crashed: asyncio.Future[bool] | None, fingerprint: bytes) -> None:
        if self.dice.random() < 0.3:
            await passes(0.2)

    def push(self, step: OutputDelta) -> None:
        self.work.receive(self.work.choices[step.index_in_n], step, time.monotonic)

    async def flush(self) -> None:
        if self.dice.random() < 0.1:
            await passes(self.dice.random() / 2)

    async def end(self) -> None: ...

    async def run(self) -> None:
        await self.work._run_on_replica(self.call, self.order, self, b"")

    # What becomes of it

    def disturb(self) -> None:
        """Something goes wrong, or right again."""
        replica = self.dice.choice(self.replicas)
        match self.dice.randrange(9):
            case 0 | 1:
                replica.frozen = True
            case 2 | 3 if replica.frozen:
                replica.closed = True
                replica.connection.doubt()
            case 4:
                replica.frozen = replica.closed = False
            case 5 if replica.closed or self.dice.random() < 0.2:
                replica.connection.connection_lost(None)
                replica.connect()
            case 6 | 7 if not replica.drains and any(each.takes for each in self.replicas if each is not replica):
                replica.drains = True
                replica.connection.want_successors()
                replica.connection.release(started=False)
            case 8:
                replica.drains = False
                heir = self.heir
                if heir is not None and heir.replica is replica.connection and heir.first_token_s is None:
                    replica.fail()

    def turn(self) -> None:
        self.patience -= 1
        if self.patience > 0 and self.dice.random() < 0.25:
            self.disturb()
        if self.patience == 0:
            self.recover()
        may_refuse = self.refuses if self.work._began_as is not None and self.patience > 0 else 0.0
        for replica in self.replicas:
            replica.turn(may_refuse)

    def recover(self) -> None:
        for replica in self.replicas:
            replica.frozen = replica.closed = replica.drains = False

    # What holds

    @property
    def heir(self) -> ReplicaStream | None:
        return None if self.work.stream is None else self.work.stream.heir

    def check(self) -> None:
        work, heir = self.work, self.heir
        for index, choice in enumerate(work.choices):
            came = choice.tokens.tolist()
            assert came == [token(index, position) for position in range(len(came))], "lost, doubled or another one"
        assert work.running.completion_tokens == sum(len(choice.tokens) for choice in work.choices)
        open_streams = {one for each in self.replicas for one in each.connection._streams.values()}
        assert open_streams <= {work.stream, heir}, "two at most"
        if work.stream is not None and heir is not None:
            assert heir.replica is not work.stream.replica

    def check_end(self, *, whole: bool) -> None:
        self.check()
        assert not any(each.connection._streams for each in self.replicas), "nothing is waited for any more"
        self.recover()
        for _ in range(2):
            for each in self.replicas:
                each.turn(0.0)
        assert not any(each.running for each in self.replicas), "nothing is computed for nobody"
        for index, choice in enumerate(self.work.choices if whole else []):
            end, stops_at = self.ends[index], self.stops_at[index]
            if stops_at is not None and stops_at <= end:
                assert (choice.finish, len(choice.tokens) >= stops_at) == ("stop string", True)
            else:
                assert (choice.finish, len(choice.tokens)) == ("length" if end == TOKENS else "stop", end)


@pytest.mark.parametrize("chunk", range(3))
def test_nothing_is_lost_doubled_or_left_behind_whatever_happens_to_replicas(chunk: int) -> None:
    @in_fake_time
    async def life(seed: int) -> None:
        world = World(seed)
        leaves_in = world.dice.choice((None, None, world.dice.randrange(60)))
        call = asyncio.create_task(world.run())
        while not call.done():
            world.turn()
            await passes(0.05)
            world.check()
            assert world.patience > -1000, "it does not end"
            if leaves_in is not None and (leaves_in := leaves_in - 1) == 0:
                call.cancel()
        if not call.cancelled():
            call.result()
        world.work.cancel()
        world.check_end(whole=not call.cancelled())

    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        try:
            life(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


# A whole gateway


def halves(gateway: Served) -> tuple[StubReplica, StubReplica]:
    """The replica that runs the call, and the other one."""
    one, other = gateway.fleet.replicas
    return (one, other) if one.running else (other, one)


def connection_to(gateway: Served, replica: StubReplica) -> ReplicaConnection:
    fleet = gateway.app._serving.context.fleet
    (found,) = [entry for entry in fleet._pools[MODEL].entries if entry.state.address == f"unix:{replica.path}"]
    connected: ReplicaConnection = found.connection
    return connected


def pause(replica: StubReplica) -> None:
    """It computes nothing, and nobody is told."""
    replica.state = frames.ReplicaState(MODEL, replica.state.address, Residency.MEMORY, 1, toward=Residency.DEVICE)


def resume(replica: StubReplica) -> None:
    replica.state = frames.ReplicaState(MODEL, replica.state.address, Residency.DEVICE, 1, toward=Residency.DEVICE)
    for each in replica.connections:
        each.wake()


async def begin(gateway: Served, tokens: int) -> tuple[Any, StubReplica, StubReplica, asyncio.Task[Any]]:
    """The calm answer, the call again with a few tokens given, and both replicas; the one that runs it is paused."""
    calm = (await gateway.chat(max_tokens=tokens, n=2)).json
    await gateway.settled()
    gateway.behaviour.step_s = 0.01
    gateway.behaviour.cached_tokens = 4
    call = asyncio.create_task(gateway.chat(max_tokens=tokens, n=2))
    await until(lambda: sum(each.emitted for each in gateway.fleet.replicas) >= 8)
    one, other = halves(gateway)
    pause(one)
    gateway.behaviour.cached_tokens = 9  # where it goes on: nobody pays for that
    return calm, one, other, call


async def doubt(gateway: Served, one: StubReplica, other: StubReplica) -> None:
    """Takes a paused replica for silent until an heir has begun: what it said before may still be on its way."""
    link, before = connection_to(gateway, one), len(other.submits)

    def has_begun() -> bool:
        link.doubt()
        return len(other.submits) > before

    await until(has_begun)


async def check_answer(gateway: Served, calm: Any, call: "asyncio.Task[Any]") -> None:
    """The call's answer is the calm one, and charged once."""
    answer = (await call).json
    for choice, before in zip(answer["choices"], calm["choices"], strict=True):
        assert choice["message"] == before["message"]
        assert choice["finish_reason"] == before["finish_reason"]
    await gateway.settled()
    charged = [(each.outcome, each.completion_tokens, each.cached_tokens) for each in await gateway.records()]
    tokens = calm["usage"]["completion_tokens"]
    assert sorted(charged) == [("done", tokens, 0), ("done", tokens, 4)]


@looped
async def test_a_call_goes_on_at_another_replica_while_its_own_is_silent(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        calm, one, other, call = await begin(gateway, 40)
        await doubt(gateway, one, other)
        await check_answer(gateway, calm, call)
        assert len(other.submits[-1].given) == 2
        assert one.deaths == 0
        await until(lambda: not one.running, what="the silent one was told")


@looped
async def test_a_call_stays_at_a_replica_that_speaks_before_the_other_one_has_a_token(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        calm, one, other, call = await begin(gateway, 40)
        gateway.behaviour.first_s = 1000.0
        await doubt(gateway, one, other)
        resume(one)
        await check_answer(gateway, calm, call)
        assert not other.running


@looped
async def test_a_call_stays_where_no_other_replica_takes_it(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        calm, one, other, call = await begin(gateway, 40)
        gateway.behaviour.reject = RejectReason.BUSY
        await doubt(gateway, one, other)
        refused = len(other.submits)
        await until(lambda: len(other.submits) > refused, what="it is asked again")
        resume(one)
        await check_answer(gateway, calm, call)


@looped
async def test_both_replicas_stop_when_the_client_leaves(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        client = await gateway.client()
        gateway.behaviour.step_s = 0.01
        messages = [{"role": "user", "content": "hello"}]
        asked = {"model": MODEL, "messages": messages, "stream": True, "max_tokens": 4000}
        await client.post("/v1/chat/completions", asked, gateway.headers)
        await until(lambda: sum(each.emitted for each in gateway.fleet.replicas) >= 4)
        one, other = halves(gateway)
        gateway.behaviour.first_s = 1000.0
        one.load(draining=True)
        await until(lambda: other.running)
        assert one.running, "it answers meanwhile"
        client.leave()
        await gateway.settled()
        (record,) = await gateway.records()
        assert record.outcome == "client_gone"


@looped
async def test_a_replica_that_drains_answers_until_another_one_does(tmp_path: Path) -> None:
    async with served(tmp_path, replicas=2) as gateway:
        calm, one, other, call = await begin(gateway, 100)
        resume(one)
        gateway.behaviour.first_s = 1000.0
        one.load(draining=True)
        await until(lambda: other.running)
        emitted = one.emitted
        await until(lambda: one.emitted > emitted)
        gateway.behaviour.first_s = 0.0
        other.hurry()
        await check_answer(gateway, calm, call)
        assert other.submits[-1].given


@looped
async def test_an_heir_that_gives_other_tokens_does_not_go_on_with_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the rounding of other shapes: what the client has is what is gone on with."""
    monkeypatch.setattr(stream, "LAG_S", 1000.0)
    async with served(tmp_path, replicas=2) as gateway:
        calm, one, other, call = await begin(gateway, 100)
        resume(one)
        gateway.behaviour.first_s = 1000.0
        one.load(draining=True)
        await until(lambda: other.running)
        given = len(other.submits[-1].given[0].tokens) // 4
        await until(lambda: one.emitted > 2 * given + 10)
        pause(one)
        for connected in other.connections:
            for running in connected.sequences:
                running.seed += 1
        gateway.behaviour.first_s = 0.0
        other.hurry()
        await check_answer(gateway, calm, call)
        assert len(other.submits[-1].given[0].tokens) // 4 > given


FAULTS: dict[str, Callable[[ReplicaConnection], None]] = {
    "silent": ReplicaConnection.doubt,
    "leaving": ReplicaConnection.want_successors,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_call_without_a_token_yet_begins_elsewhere_and_is_charged_once(fault: str, tmp_path: Path) -> None:
    @looped
    async def run() -> None:
        async with served(tmp_path, replicas=2) as gateway:
            gateway.behaviour.announce, gateway.behaviour.cached_tokens, gateway.behaviour.first_s = True, 4, 1000.0
            call = asyncio.create_task(gateway.chat(max_tokens=5))
            await until(lambda: gateway.fleet.running)
            one, other = halves(gateway)
            link = connection_to(gateway, one)
            await until(lambda: any(each.started for each in link._streams.values()))
            gateway.behaviour.first_s, gateway.behaviour.cached_tokens = 0.0, 3
            FAULTS[fault](link)
            answer = await call
            assert answer.json["usage"]["completion_tokens"] == 5
            await gateway.settled()
            (record,) = await gateway.records()
            assert (record.completion_tokens, record.cached_tokens) == (5, 3)
            assert not other.submits[-1].given

    run()
