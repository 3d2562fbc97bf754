"""How many cached blocks each account may keep, and which account loses some next. It knows no tokens."""

from prefixcache.lazy_heap import LazyHeap
from prefixcache.namespace import CacheShare
from prefixcache.radix import AccountShare, BlockCounts


class AccountShares:
    """All accounts that have blocks or leases, `by_name`, and which of them is to give up blocks next."""

    def __init__(self, blocks: int) -> None:
        self.totals = BlockCounts()
        self.floors = 0  # granted, of all accounts
        self._blocks = blocks
        self.by_name: dict[bytes, AccountShare] = {}
        self._ranks: LazyHeap[AccountShare] = LazyHeap(_rank)

    def get_or_create(self, name: bytes) -> AccountShare:
        """The account, new where it has nothing yet; `forget_if_empty` has to follow sooner or later."""
        account = self.by_name.get(name)
        if account is None:
            account = self.by_name[name] = AccountShare(name, self.totals)
        return account

    def grant(self, account: AccountShare, share: CacheShare) -> None:
        """Sets an account's share from now on. Its floor is granted as far as the floors granted before leave of the
        pool, and never above its cap; it is free again when the account has nothing left."""
        floor = share.floor if share.cap is None else min(share.floor, share.cap)
        others = self.floors - account.floor
        self.floors = others + min(floor, self._blocks - others)
        account.floor = self.floors - others
        account.cap = share.cap
        account.share = share
        self.rank(account)

    def forget_if_empty(self, account: AccountShare) -> None:
        if not account.roots and self.by_name.get(account.name) is account:
            self.floors -= account.floor
            del self.by_name[account.name]
            self._ranks.remove(account)

    def rank(self, account: AccountShare) -> None:
        """Ranks an account anew. To be called where it has more blocks above its floor, or more that nobody uses."""
        self._ranks.put(account)

    def next_to_evict(self) -> tuple[AccountShare, int] | None:
        """The account with unused blocks that is furthest above its floor, and how many blocks it is ahead of the next,
        at least 1."""
        account = self._ranks.peek()
        if account is None:
            return None
        self._ranks.remove(account)
        second = self._ranks.peek()
        self._ranks.put(account)
        level = -self._blocks if second is None else second.excess
        return account, max(1, account.excess - level)

    def check(self) -> None:
        """Raises AssertionError where a sum is wrong, or an account could never be evicted."""
        assert self.floors == sum(account.floor for account in self.by_name.values()) <= self._blocks
        for name, account in self.by_name.items():
            assert account.name == name
            assert account.roots, "an empty account is kept"
            assert account.cached == sum(root.cached for root in account.roots)
            assert account.pinned == sum(root.pinned for root in account.roots)
            assert not account.above_cap or any(root.pins for root in account.roots), (
                "unused blocks are kept above the cap"
            )
            self._ranks.check(account)
            for root in account.roots:
                assert root.account is account
                account.by_age.check(root)


def _rank(account: AccountShare) -> float | None:
    return -account.excess if account.unpinned else None
