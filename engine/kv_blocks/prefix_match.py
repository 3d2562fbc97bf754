"""What a sequence begins with: cached pages, blocks in the host's memory, and blocks of another replica, which are
copied into its own before it is in any step."""

from collections import deque
from dataclasses import dataclass, field

from engine.handover.staging import StagedPrefix
from engine.sequences.sequence import Sequence
from prefixcache.tier import TierEntry


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a sequence is to begin with: the pages that are cached, `public_blocks` of them public, and how many blocks
    are missing, the first of which are in the host's memory."""

    pages: list[int]
    public_blocks: int
    missing_blocks: int
    in_host: list[TierEntry] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StagedLoad:
    """Blocks first, first + 1, … of a staged prefix are copied into these, which `reader` alone holds."""

    reader: Sequence
    staged: StagedPrefix
    first: int
    blocks: list[int]


class StagedLoads:
    """Loads of staged prefixes, from the start of their sequence until it reads them.

    arrived  sequences whose blocks were copied since they were last taken.
    """

    def __init__(self) -> None:
        self.arrived: list[Sequence] = []
        self._loads: deque[StagedLoad] = deque()

    def blocks_of(self, sequence: Sequence) -> int:
        """How many of a sequence's first blocks are staged."""
        return 0 if sequence.staged is None else sequence.staged.whole

    def load(self, sequence: Sequence, first: int, blocks: list[int]) -> int:
        """Queues the copy of what is staged of a sequence, from block `first` on, into the first of these blocks, and
        returns of how many. What has nothing to add is released."""
        staged, count = sequence.staged, self.blocks_of(sequence) - first
        sequence.staged = None
        if staged is None:
            return 0
        if count <= 0:
            staged.release()
            return 0
        assert count <= len(blocks), "more is staged than is missing"
        self._loads.append(StagedLoad(sequence, staged, first, blocks[:count]))
        return count

    def take_loads(self) -> list[StagedLoad]:
        """Loads that begin now. Each is returned once; whoever copies releases what is staged."""
        loads = list(self._loads)
        self._loads.clear()
        return loads

    def take_arrived(self) -> list[Sequence]:
        arrived, self.arrived = self.arrived, []
        return arrived
