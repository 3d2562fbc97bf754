"""Pinned memory that the words of micro-batches are uploaded from, once or twice each. It knows nothing of what they
say."""

from collections import deque
from typing import Final

import torch
from torch import Tensor

from engine.memory.streams import DeviceStream

_WORDS_MIN: Final = 1 << 14
SLOTS_MAX: Final = 64  # more than are in use at once, so that nobody waits for one that he holds himself


class WordSlot:
    """Room for so many words; `mark` lies behind what reads them last."""

    def __init__(self, stream: DeviceStream, words: int) -> None:
        self.words = stream.staging(words, dtype=torch.int32)
        self.mark = stream.mark()
        self.used: Tensor = self.words[:0]


class WordSlots:
    """Slots as large as is asked for, made when they are first needed."""

    def __init__(self, stream: DeviceStream) -> None:
        self._stream = stream
        self._free: deque[WordSlot] = deque()
        self._count = 0

    def take(self, count: int) -> WordSlot:
        """A slot whose `used` are so many words: the oldest that was released and is large enough, or a new one. Waits
        for the device where there may be no more of them."""
        for slot in self._free:
            if len(slot.words) >= count and (slot.mark.passed() or self._count >= SLOTS_MAX):
                self._free.remove(slot)
                slot.mark.wait()
                break
        else:
            if self._count >= SLOTS_MAX:
                self._free.popleft().mark.wait()  # all are too small: a larger one takes its place
                self._count -= 1
            slot = WordSlot(self._stream, max(_WORDS_MIN, 1 << (count - 1).bit_length()))
            self._count += 1
        slot.used = slot.words[:count]
        return slot

    def release(self, slot: WordSlot) -> None:
        """Gives a slot back behind what is queued now."""
        slot.mark.set()
        self._free.append(slot)
