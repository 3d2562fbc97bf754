"""Host memory for blocks of the stamp engine: a slot has the stamps of the block that was stored there.

A load may take a while: its blocks are rubbish until it is done, so that whoever reads them too early is found out. So
are slots that are read into from disk, and what is written there must stay as it is until it is.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.step.executor import CopyOutcome, FileCopy
from tests.support.stamp_engine import Stamps

_RUBBISH = -3  # as a position


class StampLoad:
    """Copies when it is done: after it was asked for so often in vain, or waited for."""

    def __init__(self, copy: Callable[[], None], looks: int, slots: Items[int] = ()) -> None:
        self.slots = slots
        self._copy: Callable[[], None] | None = copy
        self._looks = looks

    def passed(self) -> bool:
        self._looks -= 1
        if self._looks < 0:
            self.wait()
        return self._copy is None

    @property
    def done(self) -> bool:
        return self._copy is None

    def wait(self) -> None:
        if self._copy is not None:
            self._copy()
            self._copy = None


class StampCopied:
    """What is done when these loads are."""

    def __init__(self, loads: Items[StampLoad]) -> None:
        self._loads = loads

    def passed(self) -> bool:
        return all(load.done for load in self._loads)

    def wait(self) -> None:
        for load in self._loads:
            load.wait()


class StampTier:
    """A BlockTier. Slots keep what they last had, but for what is zeroed, as real memory does."""

    def __init__(self, stamps: Stamps, slots: int, looks: Callable[[], int]) -> None:
        self.slots = min(slots, 4)
        self.files: StampFiles | None = None
        self.zeroed = 0
        self.max_slots = slots
        self._stamps = stamps
        self._looks = looks
        self._kept: dict[int, list[NDArray[Any]]] = {}
        self._loads: list[StampLoad] = []

    def grow(self) -> bool:
        before, self.slots = self.slots, self.max_slots
        return before < self.slots

    def store(self, blocks: Items[int], slots: Items[int]) -> None:
        assert len(set(slots)) == len(slots), "two blocks go into one slot"
        assert self._stamps.secret_blocks().isdisjoint(blocks), "a secret leaves for the host"
        for block, slot in zip(blocks, slots, strict=True):
            assert slot < self.slots
            places = self._stamps._slots_there([block])
            self._kept[slot] = [stamps_GK[:, places].copy() for stamps_GK in self._stamps.stamps]

    def load(self, slots: Items[int], blocks: Items[int]) -> StampLoad:
        assert len(set(blocks)) == len(blocks) == len(slots)
        places = self._stamps._slots_there(blocks)
        self._stamps.position_GK[:, places] = _RUBBISH
        loaded = [self._kept[slot] for slot in slots]

        def copy() -> None:
            for stamps_GK, *parts in zip(self._stamps.stamps, *loaded, strict=True):
                stamps_GK[:, places] = np.concatenate(parts, axis=1)

        self._loads = [*self.under_way(), StampLoad(copy, self._looks(), slots)]
        return self._loads[-1]

    def copied(self) -> StampCopied:
        return StampCopied(self.under_way())

    def under_way(self) -> list[StampLoad]:
        return [load for load in self._loads if not load.done]

    def rubbish(self) -> list[NDArray[Any]]:
        """What a slot has while it is read into."""
        kept = [stamps_GK[:, self._stamps._slots_there([0])].copy() for stamps_GK in self._stamps.stamps]
        kept[2][:] = _RUBBISH
        return kept

    def zero(self, slots: Items[int]) -> None:
        self.zeroed += len(slots)
        for slot in slots:
            self._kept.pop(slot, None)

    def positions(self, slot: int) -> list[int]:
        """What a slot still shows of whoever wrote it; nothing where it was zeroed."""
        return self._kept[slot][2][0].tolist() if slot in self._kept else []


class StampFiles:
    """BlockFiles over a StampTier. `looks` says how often it is asked for a copy in vain, `fault` what becomes of one;
    an error ends it all."""

    def __init__(
        self, tier: StampTier, places: int, looks: Callable[[], int], fault: Callable[[], CopyOutcome | None]
    ) -> None:
        self.error = ""
        self.erased = 0
        self.places = 0
        self.written: dict[int, tuple[bytes, list[NDArray[Any]]]] = {}
        self._tier = tier
        self.max_places = places
        self._looks = looks
        self._fault = fault
        self._under_way: list[tuple[FileCopy, bool, list[NDArray[Any]], int]] = []

    def grow(self) -> None:
        self.places = min(self.max_places, self.places + 8)

    def write(self, copy: FileCopy) -> None:
        assert copy.place < self.places
        self._under_way.append((copy, False, self._tier._kept[copy.slot], self._looks()))

    def read(self, copy: FileCopy) -> None:
        assert not any(copy.slot in load.slots for load in self._tier.under_way()), "what is loaded is overwritten"
        rubbish = self._tier.rubbish()
        self._tier._kept[copy.slot] = rubbish
        self._under_way.append((copy, True, rubbish, self._looks()))

    def erase(self, places: Items[int]) -> None:
        assert not {*places} & {copy.place for copy, *_ in self._under_way}, "what is read or written is erased"
        self.erased += len(places)
        for place in places:
            self.written.pop(place, None)

    def take_done(self) -> list[FileCopy]:
        done, self._under_way = self._under_way, []
        for copy, is_read, held, looks in done:
            if looks and not self.error:
                self._under_way.append((copy, is_read, held, looks - 1))
                continue
            assert self._tier._kept.get(copy.slot) is held, "a slot changed while it was read or written"
            copy.outcome = self._end(copy, is_read)
        return [copy for copy, *_ in done if copy not in {each for each, *_ in self._under_way}]

    def fileno(self) -> int:
        return -1

    def _end(self, copy: FileCopy, is_read: bool) -> CopyOutcome:
        if self.error:
            return CopyOutcome.LOST
        outcome = self._fault() or CopyOutcome.DONE
        if outcome == CopyOutcome.LOST:
            self.error = "disk_failed: told to"
            return outcome
        if not is_read:
            self.written[copy.place] = copy.name, self._tier._kept[copy.slot]
            return CopyOutcome.DONE
        if outcome == CopyOutcome.DONE:
            name, kept = self.written[copy.place]
            assert name == copy.name, "another block lies there"
            self._tier._kept[copy.slot] = kept
        return outcome
