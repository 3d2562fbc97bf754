"""engine/replica/sleep_wake.py over the simulated replica: what each Place comes to, what runs meanwhile, and what
fails."""

import json
import random
from collections.abc import Sequence as Items

import pytest

from engine.memory.errors import OutOfDeviceMemory, OutOfHostMemory
from engine.protocol.frames import PlacementStatus, SetPlacement
from engine.protocol.types import Residency, SchedulingTerms, Scope, ScopeKind
from engine.replica.sleep_wake import EXTENTS_AT_ONCE, SleepController
from engine.scheduling.step_loop import StepLoop
from engine.weights.checkpoint import CheckpointError
from tests.engine.scheduling.simulation.replica import Simulation

PROMPT = list(range(1, 9))
TENANT = Scope(ScopeKind.TENANT, b"a" * 16)
MEMORY, DEVICE = Residency.MEMORY, Residency.DEVICE
EXTENT_BLOCKS, BLOCK_TOKENS = 8, 4
EXTENT_BYTES = EXTENT_BLOCKS * BLOCK_TOKENS * 16
PIECE_BYTES = 1 << 20


class Moving:
    """The simulation's memory, whose moves may take looks, or fail once."""

    def __init__(self, simulation: Simulation) -> None:
        self._stamps = simulation.stamps
        self.layout = simulation.stamps.layout
        self.zero, self.copy = simulation.stamps.zero, simulation.stamps.copy
        self.usage = simulation.stamps.usage
        self.of_device: Exception | None = None  # what the next that takes memory of it fails with
        self.of_host: Exception | None = None
        self.looks = 0  # until all has arrived
        self.unprepared = 0  # pieces that sleep would have to copy
        self.mapped_at_once: list[int] = []

    @property
    def mapped(self) -> list[int]:
        return self._stamps.mapped

    def map(self, extents: Items[int]) -> None:
        self._take()
        self.mapped_at_once.append(len(extents))
        self._stamps.map(extents)

    def unmap(self, extents: Items[int]) -> None:
        self.mapped_at_once.append(len(extents))
        self._stamps.unmap(extents)

    def prepare(self) -> int:
        if not self.unprepared:
            return 0
        self.unprepared -= 1
        return PIECE_BYTES

    def sleep(self, keep: Items[Items[int]]) -> int:
        assert not self.unprepared, "the replica would not answer while all that is copied"
        error, self.of_host = self.of_host, None
        if error is not None:
            raise error
        return self._stamps.sleep(keep)

    def wake(self, extents: Items[Items[int]], restore: Items[Items[int]]) -> int:
        self._take()
        return self._stamps.wake(extents, restore)

    def arrived(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def _take(self) -> None:
        error, self.of_device = self.of_device, None
        if error is not None:
            raise error


class House:
    """A simulated replica of 12 extents, of which 3 hold a context, that does what it is told."""

    def __init__(self, depth: int = 2, mapped: int = 12, kept_bytes: int = 1 << 20, **sizes: object) -> None:
        self.simulation = Simulation(
            blocks=96, block_tokens=BLOCK_TOKENS, context_tokens=96, depth=depth, extent_blocks=EXTENT_BLOCKS,
            mapped=range(mapped), least=24, **sizes,  # type: ignore[arg-type]
        )  # fmt: skip
        simulation = self.simulation
        self.memory = Moving(simulation)
        simulation.loop = StepLoop(simulation, simulation.scheduler, [self.memory], simulation._mask)
        self.controller = SleepController(
            self.memory, [self.memory], simulation.scheduler, simulation.loop, kept_bytes, lambda: simulation.seconds
        )
        self.told: list[PlacementStatus] = []

    def turn(self) -> None:
        """As a replica's."""
        resting = self.simulation.loop.idle or not self.simulation.loop.turn()
        placed = self.controller.step(resting)
        if placed is not None:
            self.told.append(placed)
        self.simulation.loop.sweep()
        self.simulation.listen()

    def place(self, residency: Residency, device_bytes: int | None = None, drain_ms: int = 0) -> PlacementStatus:
        """What it comes to."""
        self.controller.order(SetPlacement(residency, device_bytes, drain_ms))
        before = len(self.told)
        for _ in range(1000):
            self.turn()
            if len(self.told) > before:
                assert self.told[-1].memory_bytes <= self.told[-1].standby_bytes
                return self.told[-1]
        raise AssertionError("it never ended")

    def finish(self) -> None:
        self.simulation.run()
        self.simulation.assert_all_finished()


def test_room_for_kv_of_other_replicas_counts_as_held_wherever_it_is() -> None:
    plain, house = House(), House()
    house.controller._reserved_bytes = 1 << 30
    for residency in (Residency.DEVICE, Residency.MEMORY):
        without, status = plain.place(residency), house.place(residency)
        assert status.memory_bytes == without.memory_bytes + (1 << 30)
        assert status.standby_bytes == without.standby_bytes + (1 << 30)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_runs_is_preempted_waits_asleep_and_goes_on_as_if_nothing_had_been(depth: int) -> None:
    house = House(depth)
    for id in range(12):
        house.simulation.submit(id, PROMPT, max_tokens=30)
    for _ in range(7):
        house.turn()
    placed = house.place(MEMORY)
    assert (placed.residency, placed.problem, placed.device_bytes) == (MEMORY, "", 0)
    steps = house.simulation.scheduler.load(False).steps
    house.simulation.submit(20, PROMPT, max_tokens=3)
    for _ in range(5):
        house.turn()
    load = house.simulation.scheduler.load(False)
    assert (load.steps, load.running, load.waiting, load.blocks) == (steps, 0, 13, 0)
    placed = house.place(DEVICE)
    assert (placed.residency, placed.problem, placed.device_bytes) == (DEVICE, "", 12 * EXTENT_BYTES)
    house.finish()


def test_draining_lets_what_runs_end_and_nothing_begin() -> None:
    house = House(sequences=1)
    (running,) = house.simulation.submit(1, PROMPT, max_tokens=10)
    house.turn()
    (waiting,) = house.simulation.submit(2, PROMPT, max_tokens=10)
    assert house.place(MEMORY, drain_ms=1_000_000).residency == MEMORY
    assert (len(running.tokens), len(waiting.tokens)) == (10, 0)
    house.place(DEVICE)
    house.finish()


def test_draining_ends_with_its_time() -> None:
    house = House()
    (running,) = house.simulation.submit(1, PROMPT, max_tokens=40)
    house.turn()
    began = house.simulation.seconds
    assert house.place(MEMORY, drain_ms=5_000).residency == MEMORY
    assert 5 <= house.simulation.seconds - began <= 8
    assert 5 <= len(running.tokens) < 10
    house.place(DEVICE)
    house.finish()


def test_a_place_on_the_device_ends_a_drain() -> None:
    house = House(sequences=1)
    for id in (1, 2):
        house.simulation.submit(id, PROMPT, max_tokens=20)
    house.turn()
    house.controller.order(SetPlacement(MEMORY, drain_ms=1_000_000))
    for _ in range(3):
        house.turn()
    assert not house.told
    assert house.place(DEVICE).residency == DEVICE
    house.finish()
    assert house.simulation.scheduler.load(False).counters.get("preemptions", 0) == 0


def test_what_is_cached_and_hot_comes_back_and_the_rest_does_not() -> None:
    found = []
    for kept_bytes in (1 << 20, 2 * EXTENT_BYTES // EXTENT_BLOCKS, 0):
        house = House(kept_bytes=kept_bytes)
        for id in (1, 2, 3):
            (entry,) = house.simulation.submit(id, list(range(1, 34)), scope=TENANT)
            house.finish()
        placed = house.place(MEMORY)
        assert placed.kept_bytes == placed.moved_bytes <= kept_bytes
        assert house.place(DEVICE).moved_bytes == placed.kept_bytes
        (entry,) = house.simulation.submit(4, list(range(1, 34)), scope=TENANT)
        house.finish()
        assert entry.started is not None
        found.append(entry.started.cached_tokens)
    assert found == [32, 8, 0]


def test_what_was_kept_comes_back_within_what_it_may_hold() -> None:
    house = House(kept_bytes=1 << 20)
    for id in range(1, 6):
        house.simulation.submit(id, list(range(100 * id, 100 * id + 60)), scope=TENANT)
        house.finish()
    house.place(MEMORY)
    house.memory.looks = 5
    house.controller.order(SetPlacement(DEVICE, 3 * EXTENT_BYTES))
    house.turn()
    assert house.controller.residency == DEVICE
    assert house.memory.mapped == [0, 1, 2]
    house.finish()


def test_deadlines_end_while_it_sleeps() -> None:
    house = House()
    house.place(MEMORY)
    (late,) = house.simulation.submit(1, PROMPT, deadline_ms=3_000)
    (patient,) = house.simulation.submit(2, PROMPT)
    for _ in range(6):
        house.turn()
    assert late.reject is not None
    assert patient.reject is None
    house.place(DEVICE)
    house.finish()


def test_too_little_host_memory_leaves_it_awake_with_all_that_it_had() -> None:
    house = House(mapped=5)
    house.simulation.submit(1, list(range(1, 34)), scope=TENANT)
    house.finish()
    house.simulation.submit(2, PROMPT, max_tokens=30)
    house.turn()
    house.memory.of_host = OutOfHostMemory("told to")
    placed = house.place(MEMORY)
    assert (placed.residency, placed.problem) == (DEVICE, "told to")
    assert house.memory.mapped == list(range(5))
    (again,) = house.simulation.submit(3, list(range(1, 34)), scope=TENANT)
    house.finish()
    assert again.started is not None
    assert again.started.cached_tokens == 32


def test_what_the_host_has_no_copy_of_is_copied_turn_by_turn_before_it_sleeps() -> None:
    house = House()
    house.memory.unprepared = 3
    house.controller.order(SetPlacement(MEMORY))
    for _ in range(3):
        house.turn()
        assert house.controller.residency == DEVICE
    house.turn()
    assert house.controller.residency == MEMORY
    assert house.told[-1].moved_bytes == 3 * PIECE_BYTES


@pytest.mark.parametrize("error", [OutOfDeviceMemory("told to"), CheckpointError("told to")])
def test_a_wake_that_fails_leaves_it_asleep_and_what_waits_waits(error: Exception) -> None:
    house = House()
    house.simulation.submit(1, PROMPT, max_tokens=30)
    house.turn()
    house.place(MEMORY)
    house.memory.of_device = error
    placed = house.place(DEVICE)
    assert (placed.residency, placed.problem, placed.device_bytes) == (MEMORY, "told to", 0)
    assert house.simulation.scheduler.load(False).waiting == 1
    assert house.place(DEVICE).residency == DEVICE
    house.finish()


def test_it_serves_while_the_rest_is_on_its_way_and_tells_when_that_is_there() -> None:
    house = House()
    house.place(MEMORY)
    (entry,) = house.simulation.submit(1, PROMPT, max_tokens=30)
    house.memory.looks = 4
    house.controller.order(SetPlacement(DEVICE))
    house.turn()
    assert (house.controller.residency, house.controller.settled) == (DEVICE, False)
    assert 0 < house.controller.pause_s(0.5) < 0.01
    for _ in range(3):
        house.turn()
    assert len(house.told) == 1, "of falling asleep"
    assert entry.tokens
    for _ in range(3):
        house.turn()
    assert [each.residency for each in house.told] == [MEMORY, DEVICE]
    assert house.controller.settled
    assert house.controller.pause_s(0.5) == 0.5
    house.finish()


def test_the_newest_place_wins_and_a_wake_under_way_ends_before_it() -> None:
    house = House()
    house.place(MEMORY)
    house.memory.looks = 3
    for residency in (DEVICE, MEMORY, DEVICE, MEMORY):
        house.controller.order(SetPlacement(residency))
    house.turn()
    assert [each.residency for each in house.told] == [MEMORY, MEMORY]
    house.controller.order(SetPlacement(DEVICE))
    house.turn()
    house.controller.order(SetPlacement(MEMORY))
    house.turn()
    assert house.controller.residency == DEVICE, "its weights are on their way"
    for _ in range(4):
        house.turn()
    assert [each.residency for each in house.told] == [MEMORY] * 3


def test_the_pool_grows_and_shrinks_some_extents_at_a_time_while_others_run() -> None:
    house = House(mapped=3)
    for id in range(6):
        house.simulation.submit(id, list(range(1, 30)), scope=TENANT, max_tokens=60)
    house.turn()
    assert house.place(DEVICE, 11 * EXTENT_BYTES).device_bytes == 11 * EXTENT_BYTES
    assert house.memory.mapped_at_once == [4, 4]
    house.memory.mapped_at_once.clear()
    assert house.place(DEVICE, 7 * EXTENT_BYTES).kv_bytes == 7 * EXTENT_BYTES
    assert sum(house.memory.mapped_at_once) == 4
    assert max(house.memory.mapped_at_once) <= EXTENTS_AT_ONCE
    house.finish()


def test_it_never_shrinks_below_what_one_context_takes_nor_below_what_runs() -> None:
    house = House()
    (entry,) = house.simulation.submit(1, list(range(1, 90)), max_tokens=6)
    for id in range(2, 6):
        house.simulation.submit(id, list(range(100 * id, 100 * id + 60)), max_tokens=30)
    for _ in range(30):
        house.turn()
    held = house.place(DEVICE, 0)
    assert held.problem == ""
    assert 3 * EXTENT_BYTES < held.device_bytes < 12 * EXTENT_BYTES
    house.finish()
    assert entry.finish is not None
    assert house.place(DEVICE, 0).device_bytes == 3 * EXTENT_BYTES
    assert house.place(MEMORY).device_bytes == 0
    assert house.place(DEVICE, 1).device_bytes == 3 * EXTENT_BYTES
    house.simulation.submit(9, list(range(1, 90)), max_tokens=6)
    house.finish()


def test_without_device_memory_it_keeps_what_it_has() -> None:
    house = House(mapped=3)
    house.memory.of_device = OutOfDeviceMemory("told to")
    placed = house.place(DEVICE, 1 << 30)
    assert (placed.residency, placed.problem, placed.kv_bytes) == (DEVICE, "told to", 3 * EXTENT_BYTES)
    assert house.place(DEVICE, 1 << 30).kv_bytes == 12 * EXTENT_BYTES


def test_without_a_number_it_wakes_with_as_much_as_it_had() -> None:
    house = House()
    house.place(DEVICE, 6 * EXTENT_BYTES)
    house.place(MEMORY)
    assert house.place(DEVICE).kv_bytes == 6 * EXTENT_BYTES
    house.place(MEMORY)
    assert house.place(DEVICE, 4 * EXTENT_BYTES).kv_bytes == 4 * EXTENT_BYTES


def test_who_is_to_stay_obeys_nothing_that_is_not_done() -> None:
    house = House(sequences=1)
    for id in (1, 2):
        house.simulation.submit(id, PROMPT, max_tokens=20)
    house.turn()
    house.controller.order(SetPlacement(MEMORY, drain_ms=1_000_000))
    house.turn()
    house.controller.stay()
    house.finish()
    assert not house.told


def test_a_move_is_one_line_and_nothing_to_do_is_none(capfd: pytest.CaptureFixture[str]) -> None:
    house = House()
    house.simulation.submit(1, list(range(1, 34)), scope=TENANT)
    house.finish()
    house.place(DEVICE)
    house.place(MEMORY)
    house.place(MEMORY)
    house.place(DEVICE, 3 * EXTENT_BYTES)
    house.memory.of_device = OutOfDeviceMemory("told to")
    house.place(DEVICE, 4 * EXTENT_BYTES)
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["event"], line["to"], line["device_bytes"]) for line in lines] == [
        ("moved", "MEMORY", 0),
        ("moved", "DEVICE", 3 * EXTENT_BYTES),
        ("move_failed", "DEVICE", 3 * EXTENT_BYTES),
    ]
    assert lines[0]["bytes"] > 0
    assert lines[0].keys() >= {"seconds", "gb_s"}
    assert lines[2]["problem"] == "told to"


@pytest.mark.parametrize("seed", range(6))
def test_any_order_at_any_time_loses_nothing(seed: int) -> None:
    """Everything is checked after each turn, and each text is that of a solo run."""
    rng = random.Random(seed)
    house = House(
        depth=1 + seed % 2, mapped=rng.randint(3, 12), kept_bytes=rng.choice([0, 4000, 1 << 20]), public=[range(1, 17)]
    )
    for turn in range(300):
        if rng.random() < 0.3 and turn < 220:
            house.memory.looks = rng.choice([0, 0, 3])
            house.memory.of_device, house.memory.of_host = (
                rng.choice([None, None, OutOfDeviceMemory("told to")]),
                rng.choice([None, None, OutOfHostMemory("told to")]),
            )
            size = rng.choice([None, rng.randrange(14 * EXTENT_BYTES)])
            house.controller.order(SetPlacement(rng.choice([MEMORY, DEVICE]), size, rng.choice([0, 0, 4_000])))
        if rng.random() < 0.2 and turn < 220:
            length = rng.randint(1, 70)
            house.simulation.submit(
                turn, list(range(1, length + 1)), rng.choice([TENANT, None]), rng.randint(1, 20),
                terms=SchedulingTerms(erase=rng.random() < 0.2),
            )  # fmt: skip
        house.turn()
    house.memory.of_device, house.memory.looks = None, 0
    house.place(DEVICE, rng.randrange(14 * EXTENT_BYTES))
    house.finish()
