"""Many calls at once, and where they go: a fleet over connections without sockets, whose replicas say how full they are
as late as a test likes."""

import asyncio
import random
from array import array
from typing import Any, Final, cast

import pytest

from engine.protocol import frames
from engine.protocol.cache_frames import HandOver
from engine.protocol.types import FinishReason, Residency, SamplingParams, SchedulingTerms, Scope
from gateway.cluster.fleet import ReplicaFleet
from gateway.cluster.stream import ReplicaStream
from tests.support.served_gateway import looped
from tests.support.stub_replica import MODEL

PLACES: Final = 64


class Replica:
    """What a gateway writes to it, it takes in when told to; so a load of its may be older than what is on its way."""

    def __init__(self, name: str, max_sequences: int = PLACES) -> None:
        self.name, self.max_sequences = name, max_sequences
        self.link: Any = None
        self._reader = frames.FrameReader()
        self._coming: list[frames.Frame] = []
        self.live: dict[int, frames.Submit] = {}
        self.started: set[int] = set()
        self.elsewhere = 0  # of another gateway
        self.moves: list[HandOver] = []

    def write(self, data: bytes) -> None:
        self._coming += self._reader.feed(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None

    @property
    def on_their_way(self) -> int:
        return sum(isinstance(frame, frames.Submit) for frame in self._coming)

    @property
    def all(self) -> int:
        return self.elsewhere + len(self.live) + self.on_their_way

    def take_in(self, count: int) -> None:
        """Reads so many frames."""
        taken, self._coming = self._coming[:count], self._coming[count:]
        for frame in taken:
            match frame:
                case frames.Submit():
                    self.live[frame.id] = frame
                case frames.Cancel():
                    for id in frame.ids:
                        self.live.pop(id, None)
                case HandOver():
                    self.moves.append(frame)

    def say(self) -> None:
        """What has started there, and its load by what it has taken in."""
        begun = [*self.live][: max(0, self.max_sequences - self.elsewhere)]
        started = [frames.SequenceStarted(id, 0, 0.0) for id in begun if id not in self.started]
        self.started.update(begun)
        self.link.receive(frames.StepOutputs([], [], b"", started=started))
        sequences = self.elsewhere + len(self.live)
        running = min(sequences, self.max_sequences)
        self.link.receive(frames.ReplicaLoad(running, sequences - running, 0, 9, 0, 0))

    def end(self, id: int) -> None:
        del self.live[id]
        finished = [frames.SequenceFinished(id, FinishReason.LENGTH, 1)]
        self.link.receive(frames.StepOutputs([id], [1], array("I", [7]).tobytes(), finished=finished))


def serve(fleet: ReplicaFleet, replica: Replica) -> None:
    """The replica's machine says that it serves, and a connection to it opens."""
    address, device = f"unix:/{replica.name}", Residency.DEVICE
    machine: Any = type("Open", (), {"asked": True, "region_of": lambda self, word: word})()
    fleet.links.connections[address] = machine
    state = frames.ReplicaState(MODEL, f"{address}/0", device, 1, toward=device)
    fleet._on_report(address, machine, frames.MachineState(replica.name, [state]))
    (entry,) = fleet._machines[address].replicas.values()
    replica.link = entry.connection = fleet._open_connection(entry)
    replica.link.connection_made(cast(asyncio.BaseTransport, replica))
    replica.link.receive(
        frames.Hello(
            2, MODEL, "r", "1", 1, 100, 100, 16, 10, 3, "d", f"{address}/kv", max_sequences=replica.max_sequences
        )
    )


@pytest.fixture
def without_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cluster.replica_links.ReplicaLinks.keep", lambda self, entry: None)


async def call(fleet: ReplicaFleet, number: int, background: bool = False) -> ReplicaStream:
    tokens = array("I", [number] * 40).tobytes()
    chosen = await fleet.acquire(MODEL, b"s" * 16, tokens, asyncio.get_running_loop().time(), background=background)
    return chosen.submit(
        frames.Submit(0, tokens, Scope(), SamplingParams(), 8, terms=SchedulingTerms(background=background))
    )


@pytest.mark.usefixtures("without_sockets")
@pytest.mark.parametrize("seed", range(8))
@looped
async def test_as_a_host_comes_back_no_replica_gets_more_than_it_runs_while_another_has_room(seed: int) -> None:
    """Replicas say their load while calls are on their way to them, and those calls are in none of these loads."""
    dice, fleet = random.Random(seed), ReplicaFleet([])
    print("seed", seed)
    replicas = [Replica(f"m{number}") for number in range(5)]
    for replica in replicas[:4]:
        serve(fleet, replica)
    for number in range(200):
        await call(fleet, dice.randrange(40))
        for replica in dice.sample(replicas[:4], 2):
            replica.take_in(dice.randrange(3))
            replica.say()
        assert max(replica.all for replica in replicas) <= PLACES, number
    serve(fleet, replicas[4])
    replicas[4].say()
    for number in range(120):
        await call(fleet, dice.randrange(40))
        for replica in dice.sample(replicas, 2):
            replica.take_in(dice.randrange(2))
            replica.say()
        assert max(replica.all for replica in replicas) <= PLACES, number
    assert [replica.all for replica in replicas] == [PLACES] * 5, "they are all full"
    await call(fleet, 1)
    assert max(replica.all for replica in replicas) == PLACES + 1, "it waits where it is next"


@pytest.mark.usefixtures("without_sockets")
@looped
async def test_what_other_gateways_have_there_is_counted_and_what_has_ended_is_not() -> None:
    fleet = ReplicaFleet([])
    one, other = Replica("one"), Replica("other")
    for replica in (one, other):
        serve(fleet, replica)
        replica.elsewhere = 30
        replica.say()
    streams = [await call(fleet, number) for number in range(68)]
    assert (one.all, other.all) == (PLACES, PLACES)
    one.say()
    assert one.link.expected == PLACES, "a load that is older than what is on its way frees no room"
    one.take_in(99)
    one.say()
    assert one.link.expected == PLACES, "and one that is not counts nothing twice"
    for id in [*one.live][:4]:
        one.end(id)
    assert one.link.expected == PLACES - 4, "it needs no load to see that"
    for _ in range(4):
        await call(fleet, 7)
    assert (one.all, other.all) == (PLACES, PLACES)
    mine = [stream for stream in streams if stream.replica is other.link]
    mine[0].cancel()
    assert other.link.expected == PLACES - 1
    other.take_in(99)
    other.elsewhere = 20
    other.say()
    assert other.link.expected == PLACES - 11


@pytest.mark.usefixtures("without_sockets")
@looped
async def test_the_background_is_counted_apart_until_it_ends() -> None:
    fleet, replica = ReplicaFleet([]), Replica("one")
    serve(fleet, replica)
    streams = [await call(fleet, number, background=number > 0) for number in range(3)]
    assert (replica.link.sequences, replica.link.background) == (1, 2)
    replica.link.receive(frames.StepOutputs([], [], b"", started=[frames.SequenceStarted(1, 0, 0.0)]))
    replica.link.receive(frames.ReplicaLoad(3, 0, 0, 9, 0, 0, background=4))
    assert (replica.link.sequences, replica.link.background) == (3, 4)
    streams[1].cancel()
    replica.link.receive(frames.Reject(streams[2].first_id, frames.RejectReason.BUSY, "full", 100))
    assert (replica.link.sequences, replica.link.background) == (3, 2)


@pytest.mark.usefixtures("without_sockets")
@looped
async def test_streams_that_are_handed_over_fill_no_replica_beyond_what_it_runs() -> None:
    """Their number is not seen in a load before they have moved."""
    fleet = ReplicaFleet([])
    leaving, *others = replicas = [Replica("leaving"), Replica("a", 16), Replica("b", 16), Replica("c", 16)]
    serve(fleet, leaving)
    for number in range(40):
        await call(fleet, number)
    leaving.take_in(99)
    for id in leaving.live:
        tokens = array("I", [7]).tobytes()
        leaving.link.receive(frames.StepOutputs([id], [1], tokens, started=[frames.SequenceStarted(id, 0, 0.0)]))
    for replica in others:
        serve(fleet, replica)
    leaving.link.hand_over(replica.link for replica in replicas)
    leaving.take_in(99)
    assert len(leaving.moves) == 40
    assert sorted(replica.link.expected for replica in others) == [13, 13, 14]


@pytest.mark.usefixtures("without_sockets")
@looped
async def test_a_replica_that_does_not_say_how_many_it_runs_is_never_full() -> None:
    fleet = ReplicaFleet([])
    old, other = Replica("old", 0), Replica("other", 8)
    serve(fleet, old)
    serve(fleet, other)
    for number in range(100):
        await call(fleet, number)
    assert (old.all, other.all) == (92, 8)
