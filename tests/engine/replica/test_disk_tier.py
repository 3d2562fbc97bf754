"""The built-in model on a CPU with a pool that holds one prompt of many, and host memory that holds one or two: texts
with files on disk below them are those without, and nothing of a prompt can be read from the files."""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.execution.kv_groups import CpuKVGroup
from engine.execution.memory_plan import DoesNotFit
from engine.execution.open import open_model
from engine.kv_blocks.block_pool import blocks_of
from engine.protocol.frames import Submit
from engine.protocol.types import Residency, SamplingParams, SchedulingTerms, TierLoad
from engine.tiers import disk_blocks
from tests.engine.replica.test_host_tier import CANARY, HOST_BYTES, OTHER, PROMPTS, TENANT, Turns, ember

pytestmark = pytest.mark.usefixtures("inference")
SWEEPS_MAX = 100_000
BLOCK_BYTES = 16 * 8192  # of the built-in model: 16 tokens


def opened(folder: Path) -> Turns:
    spec = ember(host_kv_bytes=HOST_BYTES, disk_kv_bytes=256 << 20, disk_kv_folder=str(folder))
    return Turns(open_model(spec, "cpu", 1, lambda: None), spec)


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Turns]:
    monkeypatch.setattr(disk_blocks, "FETCH_S", 1e6)
    made = opened(tmp_path / "kv")
    rest(made, lambda: made.host.disk.index.slots > 0)
    yield made
    made.model.close()


def rest(turns: Turns, until: Callable[[], bool]) -> None:
    """Sweeps, as an idle replica does, until the disk has come so far."""
    for _ in range(SWEEPS_MAX):
        if until():
            return
        turns.loop.sweep()
    raise AssertionError("the disk never comes so far")


def leave_for_disk(turns: Turns) -> None:
    """What is cached goes to host memory, from there to disk, and host memory loses it."""
    turns.place(Residency.MEMORY)
    turns.place(Residency.DEVICE)
    index, disk = turns.host.index, turns.host.disk
    wanted = {entry.name for entry in index._entries.values()}
    rest(turns, lambda: wanted <= {e.name for e in disk.index._entries.values() if not e.arriving})
    index.forget([*wanted])
    rest(turns, lambda: not index.unerased)


def files_hold(turns: Turns, rows: bytes) -> bool:
    tier: Any = turns.model.tier
    return any(rows in Path(f"/proc/self/fd/{file}").read_bytes() for file in tier.files._files)


def kv_of_canary(turns: Turns) -> bytes:
    """Bytes of one block of the canary's KV, which is on the device."""
    submit = Submit(9, array("I", CANARY).tobytes(), TENANT, SamplingParams(), 1)
    (sequence,) = turns.door.sequences(submit, 1, 0.0)
    kv, memory = turns.scheduler.kv, turns.model.paged
    assert isinstance(memory, CpuKVGroup)
    assert sequence.namespace is not None
    lease = kv.tree.match(sequence.namespace, array("I", CANARY), sequence.retention)
    rows: bytes = memory.pool.words_LNW[1, blocks_of(lease.blocks)[4]].numpy().tobytes()
    kv.tree.release(lease)
    return rows


def test_texts_are_the_same_where_their_prompts_come_back_from_disk(turns: Turns) -> None:
    texts = [turns.text(id, PROMPTS[id])[0] for id in range(2)]
    leave_for_disk(turns)
    for id in range(2):
        assert turns.text(10 + id, PROMPTS[id]) == (texts[id], 144)
    assert turns.counted("disk_hit_tokens") == 2 * 144
    assert turns.counted("disk_loaded_bytes") == turns.counted("disk_loaded_blocks") * BLOCK_BYTES
    assert turns.counted("disk_corrupt_blocks") == 0


def test_how_full_the_tiers_are_is_what_is_found_there(turns: Turns) -> None:
    tier: Any = turns.model.tier
    room = HOST_BYTES, tier.files.max_places * BLOCK_BYTES
    assert turns.host.loads(tier) == (TierLoad(0, room[0]), TierLoad(0, room[1]))
    turns.text(0, PROMPTS[0])
    leave_for_disk(turns)
    held_bytes = turns.host.disk.index.cached * BLOCK_BYTES
    assert held_bytes >= 9 * BLOCK_BYTES
    assert turns.host.loads(tier) == (TierLoad(0, room[0]), TierLoad(held_bytes, room[1]))
    turns.text(1, PROMPTS[0])
    assert turns.host.loads(tier)[0] == TierLoad(9 * BLOCK_BYTES, room[0])


def test_a_canary_is_in_host_memory_and_in_no_file_on_disk(turns: Turns) -> None:
    turns.text(1, PROMPTS[0])
    canary = kv_of_canary(turns)
    turns.place(Residency.MEMORY)
    turns.place(Residency.DEVICE)
    assert turns.holds(canary), "the control: in host memory it is as it is"
    leave_for_disk(turns)
    assert turns.counted("disk_stored_blocks") >= 9
    assert not turns.holds(canary)
    assert not files_hold(turns, canary)
    assert not files_hold(turns, canary[:64])
    assert turns.text(2, PROMPTS[0])[1] == 144, "the control: it is there"


def test_what_is_to_be_erased_never_comes_to_disk(turns: Turns) -> None:
    turns.text(1, PROMPTS[0], TENANT, SchedulingTerms(erase=True))
    turns.text(2, PROMPTS[1], OTHER, SchedulingTerms(erase=True))
    leave_for_disk(turns)
    assert turns.counted("disk_stored_blocks") == 0
    assert turns.text(4, PROMPTS[0])[1] == 0


def test_a_disk_on_which_every_byte_changed_costs_time_and_no_text(turns: Turns) -> None:
    text, _ = turns.text(1, PROMPTS[0])
    leave_for_disk(turns)
    tier: Any = turns.model.tier
    for file in tier.files._files:
        path = Path(f"/proc/self/fd/{file}")
        path.write_bytes(path.read_bytes().translate(bytes(byte ^ 1 for byte in range(256))))
    assert turns.text(2, PROMPTS[0]) == (text, 0)
    assert turns.counted("disk_corrupt_blocks") == 9


def test_a_disk_that_fails_ends_the_tier_and_no_call(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = turns.text(1, PROMPTS[0])
    leave_for_disk(turns)

    def fail(*_: object) -> int:
        raise OSError(5, "told to")

    monkeypatch.setattr("os.preadv", fail)
    assert turns.text(2, PROMPTS[0]) == (text, 0)
    assert turns.counted("disk_ended") == 1
    assert turns.model.tier is not None
    assert turns.host.loads(turns.model.tier)[1] == TierLoad(0, 0), "nothing is found there, and there is no room"
    assert turns.text(3, PROMPTS[0])[0] == text


def test_what_was_on_disk_is_found_after_a_sleep(turns: Turns) -> None:
    text, _ = turns.text(1, PROMPTS[0])
    leave_for_disk(turns)
    turns.place(Residency.MEMORY)
    turns.place(Residency.DEVICE)
    assert turns.text(2, PROMPTS[0]) == (text, 144)


@pytest.mark.parametrize("missing", ["host_kv_bytes", "disk_kv_folder"])
def test_a_disk_without_host_memory_or_a_folder_is_refused(missing: str, tmp_path: Path) -> None:
    spec: dict[str, Any] = {"host_kv_bytes": HOST_BYTES, "disk_kv_bytes": 1 << 30, "disk_kv_folder": str(tmp_path)}
    with pytest.raises(DoesNotFit, match="disk_kv_bytes is for what host memory has no more room for"):
        open_model(ember(**{key: value for key, value in spec.items() if key != missing}), "cpu", 1, lambda: None)
