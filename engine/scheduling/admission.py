"""Which of an account's sequences is let in beside the prompts that run, if any is. It does not know whose turn it is,
nor whether there is a place and room in memory.

An account's prompts may use up its own part of a step's rows and no more; who was preempted comes first; and who would
compute what a running prompt computes steps aside, until that is cached.
"""

from array import array
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.fair_queue import AccountQueue, fair_shares
from engine.scheduling.sequence import Sequence, SequenceState
from prefixcache.namespace import Namespace

LOOK_AHEAD: Final = 4  # how many of an account are looked at for one that does not wait for another's prefix


class PrefillAdmission:
    """The running sequences whose prompt is not computed, while others are let in beside them."""

    def __init__(self, running: list[Sequence], rows: int, block_tokens: int) -> None:
        """All that run have so many rows of a step."""
        self._rows = rows  # left beside one for each that runs
        self._block_tokens = block_tokens
        self._oldest: dict[AccountQueue[Sequence], Sequence] = {}
        self._pending: dict[AccountQueue[Sequence], int] = {}
        self._namespaces: dict[Namespace, list[Sequence]] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """It runs beside the others from now on."""
        self._rows -= 1
        if len(sequence.tokens) - sequence.computed <= 1:
            return
        if sequence.namespace is not None:
            self._namespaces.setdefault(sequence.namespace, []).append(sequence)
        if sequence.pending > 1:  # the rest of its prompt may be in the air
            standing = sequence.standing
            self._pending[standing] = self._pending.get(standing, 0) + sequence.pending
            if standing not in self._oldest or sequence.ticket < self._oldest[standing].ticket:
                self._oldest[standing] = sequence

    def choose(self, standing: AccountQueue[Sequence]) -> Sequence | None:
        """What this account would start, were it its turn."""
        if self._full(standing):
            return None
        if standing.resuming:
            return next(iter(standing.resuming))
        ready = (each for each in standing.waiting if each.compilation is None)
        return next((each for each in islice(ready, LOOK_AHEAD) if not self._held(each)), None)

    def _full(self, standing: AccountQueue[Sequence]) -> bool:
        """Whether an account's prompts use up what is its own of the rows. Half of that is its oldest's, as far as it
        needs them."""
        if self._rows <= 0:
            return True
        others = [each for each in self._pending if each is not standing]
        wanted = [self._rows, *(self._pending[each] for each in others)]
        share = fair_shares([standing, *others], wanted, self._rows)[0]
        oldest = self._oldest[standing].pending if standing in self._oldest else 0
        return self._pending.get(standing, 0) - oldest >= share - min(oldest, share - share // 2)

    def _held(self, sequence: Sequence) -> bool:
        """Whether a running prompt is about to cache blocks that this one would otherwise compute again.

        Whom it waits for is remembered: asked in every step, it must not compare whole prompts in every step.
        """
        if sequence.namespace is None:
            return False
        size, behind = self._block_tokens, sequence.behind
        if behind is not None and behind[0].stage == SequenceState.RUNNING and behind[0].computed // size < behind[1]:
            return True
        sequence.behind = None
        for other in self._namespaces.get(sequence.namespace, []):
            next_end = (other.computed // size + 1) * size
            if next_end >= len(sequence.tokens) or next_end > len(other.tokens):
                continue
            if sequence.tokens[next_end - 1] == other.tokens[next_end - 1]:  # else not the same block for sure
                common = common_prefix_length(_ids(other.tokens), _ids(sequence.tokens)[:-1])
                if common >= next_end:
                    sequence.behind = other, common // size
                    return True
        return False


def common_prefix_length(some: NDArray[np.integer], others: NDArray[np.integer]) -> int:
    """The length of the longest common prefix."""
    length = min(len(some), len(others))
    differ = some[:length] != others[:length]
    return int(differ.argmax()) if differ.any() else length


def _ids(tokens: "array[int]") -> NDArray[np.uint32]:
    return np.frombuffer(tokens, np.uint32)
