"""Memory comes and goes under the blocks of a KV pool: extents that grow and shrink, sleep and wake, and trades between
the groups of layers. It decides and renames; whoever calls it maps, copies and erases.

The groups of a model share its memory, and no ratio between them is set: a group that has to evict, or has too few
blocks, gets extents of one that has free ones, of one whose unused blocks are older, or, where it has none left to
evict, of any that has.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.kv_blocks.block_pool import ShrinkPlan, WakeExtents
from engine.kv_blocks.kv_manager import KVManager
from engine.step.executor import PagedLayout


@dataclass(frozen=True, slots=True)
class ExtentTrade:
    """Group `giver` shrinks by `count` extents, and group `taker` grows by as many as their bytes make."""

    giver: int
    taker: int
    count: int


class KVExtents:
    """The extents of every group of a KVManager: group 0 is the tree's, the others those of `windowed`."""

    def __init__(self, kv: KVManager, layouts: Items[PagedLayout]) -> None:
        self._kv = kv
        self._layouts = layouts

    def grow(self, extents: Items[int], group: int = 0) -> None:
        """Adds the blocks of newly mapped extents, and lets a sequence that found too few blocks try again."""
        self._kv.pools[group].grow(extents)
        self._kv.retry_short()

    def shrink(self, count: int, group: int = 0) -> ShrinkPlan:
        """Takes up to so many extents out of use, those in which least is held. What fits nowhere else is evicted as
        where blocks are short, but nothing that sequences hold, nor the block that each of them may need next.

        To be done next, in this order: erase the blocks of `take_unerased`, copy the plan's sources to its targets,
        erase what is `secret` of the sources, and unmap the extents.
        """
        kv, pool = self._kv, self._kv.pools[group]
        kv.expired.free_all()
        kv.retry_short()
        extents = pool.cheapest_extents(count)
        while extents and pool.blocks_in(extents) > kv.available(group) - len(kv.holders):
            extents.pop()
        kv.free_up(group, pool.blocks_in(extents))
        plan, renamed = pool.shrink(extents)
        kv.rename(group, renamed)
        return plan

    def next_trade(self) -> ExtentTrade | None:
        """The trade that is worth most now, if one is. To be carried out with nothing in flight, by `shrink` and
        `grow`. Costs nothing while no group evicts, and all have a block for each sequence that runs."""
        kv = self._kv
        if not kv.windowed or kv.pool.asleep:
            return None
        pressed, next_blocks = kv.take_pressed(), len(kv.holders)  # nobody is preempted for one while a group has room
        available = enumerate(kv.all_available())
        lacking = {
            at: now <= next_blocks or pressed[at] > 1 for at, now in available if pressed[at] or now < next_blocks
        }
        givers = [at for at, more in enumerate(pressed) if more <= 1]  # none of those that lack blocks themselves
        for taker in sorted(lacking, key=lacking.__getitem__, reverse=True):  # a group that only evicts waits
            if (trade := self._trade_for(taker, max(1, pressed[taker] - 1), lacking[taker], givers)) is not None:
                return trade
        return None

    def _trade_for(self, taker: int, blocks: int, lacking: bool, givers: list[int]) -> ExtentTrade | None:
        """The trade for a group that lacks so many blocks, or had to evict, with one of the givers."""
        kv, layout = self._kv, self._layouts[taker]
        if not layout.block_bytes or not (
            wanted := kv.pools[taker].extents_to_grow(-(-blocks // layout.extent_blocks))
        ):
            return None
        for giver in givers:
            other = self._layouts[giver]
            if giver != taker and other.block_bytes:
                unit = -(-layout.extent_bytes // other.extent_bytes)  # of the giver's extents, for one of the taker's
                extents = kv.pools[giver].cheapest_extents(-(-len(wanted) * layout.extent_bytes // other.extent_bytes))
                spare = kv.available(giver) if lacking or self._older(giver, taker) else kv.pools[giver].free_blocks
                while extents and kv.pools[giver].blocks_in(extents) > spare - len(kv.holders):
                    extents.pop()
                if count := len(extents) // unit * unit:
                    return ExtentTrade(giver, taker, count)
        return None

    def extents_to_take(self, trade: ExtentTrade, given: int) -> list[int]:
        """The extents that the taker of a trade grows by, where so many were given."""
        given_bytes = given * self._layouts[trade.giver].extent_bytes
        extents = self._kv.pools[trade.taker].extents_to_grow(given_bytes // self._layouts[trade.taker].extent_bytes)
        self._kv.traded_extents += len(extents)
        return extents

    def _older(self, giver: int, taker: int) -> bool:
        """Whether what the giver would evict was last used twice as long ago as what the taker would: else both would
        trade to and fro."""
        giver_s, taker_s = self._kv.unused_s(giver), self._kv.unused_s(taker)
        return giver_s is not None and taker_s is not None and giver_s > 2 * taker_s

    def sleep(self, max_kept_blocks: int) -> list[list[int]]:
        """Takes all memory off the pools, while nothing runs. Returns the blocks of each group that are kept, in the
        order in which they are to be restored: public prefixes, always, and with them up to so many blocks of what is
        wanted soonest; never a secret, nor what is found no more. `take_unerased` is to be erased before the memory is
        unmapped.

        Asleep, `take_unerased` names blocks that were kept and then freed as they were returned here.
        """
        self._kv.forget_all_but(max_kept_blocks)
        return [pool.sleep() for pool in self._kv.pools]

    def plan_wake(self, extents: Items[int]) -> list[WakeExtents]:
        """Plans to wake with so many extents of each group, see BlockPool."""
        return [pool.plan_wake(count) for pool, count in zip(self._kv.pools, extents, strict=True)]

    def finish_wake(self, plans: Items[WakeExtents]) -> None:
        """Wakes the pools as planned. A sleep that failed is taken back by the extents that had memory before, and the
        blocks that `sleep` returned."""
        self._kv.retry_short()
        for group, plan in enumerate(plans):
            self._kv.rename(group, self._kv.pools[group].finish_wake(plan))
