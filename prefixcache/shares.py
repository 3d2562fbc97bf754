"""Whose cached blocks they are, how many each account may keep, and who loses some next. It knows no tokens."""

from prefixcache.lazy_heap import LazyHeap
from prefixcache.namespace import CacheShare
from prefixcache.radix import NamespaceRoot


class BlockCounts:
    """Blocks that are cached, pinned by leases, and pinned by two or more."""

    __slots__ = ("cached", "pinned", "shared")

    def __init__(self) -> None:
        self.cached = self.pinned = self.shared = 0


class ScopeState:
    """What one scope's namespaces of the current epoch have in common."""

    __slots__ = ("epoch", "keep_s", "roots")

    def __init__(self, epoch: int) -> None:
        self.roots: dict[NamespaceRoot, None] = {}
        self.epoch = epoch
        self.keep_s: float | None = None


class AccountShare:
    """The sums over one account's namespaces, its share, and its namespaces by age."""

    __slots__ = ("ages", "cached", "cap", "floor", "name", "pinned", "roots", "sums")

    def __init__(self, name: bytes, sums: BlockCounts) -> None:
        self.name = name
        self.sums = sums  # of all accounts
        self.roots: dict[NamespaceRoot, None] = {}
        self.ages: LazyHeap[NamespaceRoot] = LazyHeap(NamespaceRoot.age)
        self.floor = 0  # as it was granted
        self.cap: int | None = None
        self.cached = 0
        self.pinned = 0

    @property
    def unpinned(self) -> int:
        return self.cached - self.pinned

    @property
    def excess(self) -> int:
        """Blocks above the floor; negative below it."""
        return self.cached - self.floor

    @property
    def over(self) -> int:
        """Blocks above the cap that nobody uses."""
        return 0 if self.cap is None else max(0, min(self.cached - self.cap, self.unpinned))

    def take_in(self, root: NamespaceRoot) -> None:
        """From now on the root's blocks count for this account and no other."""
        before = root.account
        if before is not self:
            before.leave_out(root)
            before.cached -= root.cached
            before.pinned -= root.pinned
            self.cached += root.cached
            self.pinned += root.pinned
            root.account = self
        self.roots[root] = None
        self.ages.put(root)

    def leave_out(self, root: NamespaceRoot) -> None:
        del self.roots[root]
        self.ages.remove(root)


class AccountShares:
    """All accounts that have blocks or leases, and which of them is to give up blocks next."""

    def __init__(self, blocks: int) -> None:
        self.sums = BlockCounts()
        self.floors = 0  # granted, of all accounts
        self._blocks = blocks
        self._known: dict[bytes, AccountShare] = {}
        self._ranks: LazyHeap[AccountShare] = LazyHeap(_rank)

    def all(self) -> list[AccountShare]:
        return list(self._known.values())

    def find(self, name: bytes) -> AccountShare | None:
        return self._known.get(name)

    def named(self, name: bytes) -> AccountShare:
        """The account, new where it has nothing yet; `forget_if_empty` has to follow sooner or later."""
        account = self._known.get(name)
        if account is None:
            account = self._known[name] = AccountShare(name, self.sums)
        return account

    def grant(self, account: AccountShare, share: CacheShare) -> None:
        """Sets an account's share from now on. Its floor is granted as far as those granted before leave of the pool,
        and never above its cap; it is free again when the account has nothing left."""
        floor = share.floor if share.cap is None else min(share.floor, share.cap)
        others = self.floors - account.floor
        self.floors = others + min(floor, self._blocks - others)
        account.floor = self.floors - others
        account.cap = share.cap
        self.rank(account)

    def forget_if_empty(self, account: AccountShare) -> None:
        if not account.roots and self._known.get(account.name) is account:
            self.floors -= account.floor
            del self._known[account.name]
            self._ranks.remove(account)

    def rank(self, account: AccountShare) -> None:
        """To be called where an account has more above its floor than it had, or more that nobody uses."""
        self._ranks.put(account)

    def furthest(self) -> tuple[AccountShare, int] | None:
        """Who has unused blocks and is furthest above its floor, and how many blocks it is ahead of the next, or 1."""
        account = self._ranks.least()
        if account is None:
            return None
        self._ranks.remove(account)
        second = self._ranks.least()
        self._ranks.put(account)
        level = -self._blocks if second is None else second.excess
        return account, max(1, account.excess - level)

    def check(self) -> None:
        """Raises AssertionError where a sum is wrong, or an account could never be evicted."""
        assert self.floors == sum(account.floor for account in self._known.values()) <= self._blocks
        for name, account in self._known.items():
            assert account.name == name
            assert account.roots, "an empty account is kept"
            assert account.cached == sum(root.cached for root in account.roots)
            assert account.pinned == sum(root.pinned for root in account.roots)
            assert not account.over or any(root.pins for root in account.roots), "unused blocks are kept above the cap"
            self._ranks.check(account)
            for root in account.roots:
                assert root.account is account
                account.ages.check(root)


def _rank(account: AccountShare) -> float | None:
    return -account.excess if account.unpinned else None
