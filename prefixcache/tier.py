"""Which blocks that left their pool lie in which slots of a tier below it: found by name, shared out by account.

A tier is memory that is slower and larger than the pool. What is found there is copied back and stays, so that it need
not be copied again when the pool evicts it next. It knows no tokens, no tensors and not what a slot is made of.

A slot is free, or holds one entry. What may not be kept any longer, because its epoch is over or nobody used it for too
long, is found no more from that moment on, and `sweep` gives its slots to be erased.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Final, NamedTuple

from prefixcache.lazy_heap import LazyHeap
from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy, ScopeKey

KEEP_S_MAX: Final = 3600.0  # after its last use nothing is found here any more: a purge that nobody tells of ends so


class DepartedBlocks(NamedTuple):
    """A run of blocks that a pool evicts for want of space, with the names of each, and what bounds their keeping."""

    namespace: Namespace
    policy: RetentionPolicy
    used_s: float
    names: list[bytes]
    blocks: list[int]


class TierEntry:
    """One block in a slot. While `pins` is above 0 its slot is about to be read or written, and stays as it is.

    arriving    it is on its way here from another tier, and not found before it is there; it is pinned.
    fetched     it came from a tier below, and nobody has read it since.
    """

    __slots__ = ("account", "arriving", "fetched", "name", "pins", "scope", "slot", "used_s")

    def __init__(self, name: bytes, slot: int, scope: "_Scope", account: "_Account", used_s: float) -> None:
        self.name = name
        self.slot = slot
        self.scope = scope
        self.account = account
        self.used_s = used_s
        self.pins = 0
        self.arriving = self.fetched = False

    @property
    def expires_s(self) -> float:
        keep_s = self.scope.keep_s
        return self.used_s + (KEEP_S_MAX if keep_s is None else min(keep_s, KEEP_S_MAX))


class _Scope:
    """The entries of one scope's current epoch."""

    __slots__ = ("entries", "epoch", "keep_s", "key")

    def __init__(self, key: ScopeKey, epoch: int) -> None:
        self.key = key
        self.epoch = epoch
        self.keep_s: float | None = None
        self.entries: dict[TierEntry, None] = {}


class _Account:
    """What one account has here; `evictable`: the least recently used first."""

    __slots__ = ("cached", "evictable", "floor", "name", "share")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.share = CacheShare()
        self.floor = 0  # of its share, as far as it was granted
        self.cached = 0
        self.evictable: OrderedDict[TierEntry, None] = OrderedDict()

    @property
    def rank(self) -> float | None:
        """The lowest one's account loses an entry next; None: it has none to lose."""
        return self.floor - self.cached if self.evictable else None


class TierIndex:
    """The entries of all scopes. Every operation costs a few dict and heap operations for each block.

    counters    stored_blocks, and those that found no place (refused_blocks), were evicted_blocks for others, or
                were swept_blocks.
    """

    def __init__(self, slots: int, clock: Callable[[], float]) -> None:
        """The clock gives seconds and never goes back."""
        self.slots = slots
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._free = list(range(slots))[::-1]  # the last one is taken first
        self._unerased: list[int] = []
        self._entries: dict[bytes, TierEntry] = {}
        self._scopes: dict[ScopeKey, _Scope] = {}
        self._accounts: dict[bytes, _Account] = {}
        self._floors = 0  # granted, of all accounts
        self._ranks: LazyHeap[_Account] = LazyHeap(lambda account: account.rank)
        self._expiring: LazyHeap[TierEntry] = LazyHeap(lambda entry: entry.expires_s)
        self._wiped: list[TierEntry] = []  # of old epochs: their slots are not free yet
        self._orphans: set[TierEntry] = set()  # gone, and pinned until they are read

    @property
    def cached(self) -> int:
        """How many blocks can be found here."""
        return len(self._entries)

    def add_slots(self, count: int) -> None:
        """Adds slots behind those that there are."""
        self._free[:0] = range(self.slots, self.slots + count)[::-1]
        self.slots += count

    # Finding

    def has_scope(self, namespace: Namespace, policy: RetentionPolicy) -> bool:
        """Whether there may be blocks of a namespace here. A newer epoch than any before wipes its scope; the policy
        holds from now on."""
        scope = self._scopes.get(namespace.scope)
        if scope is None:
            return False
        if namespace.epoch > scope.epoch:
            self._wipe(namespace.scope)
            return False
        if namespace.epoch < scope.epoch:
            return False
        self._keep_for(scope, policy.keep_s)
        return True

    def find(self, names: Iterable[bytes]) -> list[TierEntry]:
        """The entries of these names up to the first that is not here. No later name is asked for."""
        found: list[TierEntry] = []
        now_s = self._clock()
        for name in names:
            entry = self._entries.get(name)
            if entry is None or entry.arriving or entry.expires_s <= now_s:
                break
            found.append(entry)
        return found

    def entry(self, name: bytes) -> TierEntry | None:
        """The entry of this name, though it may be arriving, or past its time."""
        return self._entries.get(name)

    def pin(self, entries: Items[TierEntry]) -> None:
        """Keeps these slots as they are until `unpin`. It counts as a use."""
        now_s = self._clock()
        for entry in entries:
            entry.used_s = now_s
        self.hold(entries)

    def hold(self, entries: Items[TierEntry]) -> None:
        """Keeps these slots as they are until `unpin`, for whoever is no user: they are kept no longer for it."""
        for entry in entries:
            entry.pins += 1
            entry.account.evictable.pop(entry, None)

    def unpin(self, entries: Items[TierEntry]) -> None:
        """Ends a pin. A run's last block is evicted first, so that what is left begins where the run does."""
        for entry in reversed(entries):
            entry.pins -= 1
            if entry.pins:
                continue
            if entry in self._orphans:
                self._orphans.remove(entry)
                self._release(entry.slot)
            elif self._entries.get(entry.name) is entry:
                entry.account.evictable[entry] = None
                self._ranks.put(entry.account)

    # Keeping

    def offer(self, departed: DepartedBlocks) -> list[tuple[int, int]]:
        """Takes in blocks that a pool evicts. Returns those that are to be copied, each with its slot; the others are
        here already, or find no place. The last of a run come first: they are evicted before those that lead to them.

        A place is a free slot, or one of the account that is furthest above its floor. None gives way that is not above
        its own, unless it is the same account.
        """
        namespace, policy, copies = departed.namespace, departed.policy, list[tuple[int, int]]()
        scope = self._scopes.get(namespace.scope)
        if scope is not None and namespace.epoch > scope.epoch:
            self._wipe(namespace.scope)
            scope = None
        if scope is not None and namespace.epoch < scope.epoch:
            return []
        scope = scope or _Scope(namespace.scope, namespace.epoch)
        self._keep_for(scope, policy.keep_s)
        account = self._accounts.get(policy.account) or _Account(policy.account)
        account.share = policy.share
        self._grant(account)
        for name, block in zip(reversed(departed.names), reversed(departed.blocks), strict=True):
            known = self._entries.get(name)
            if known is not None:
                known.used_s = max(known.used_s, departed.used_s)
                if known in known.account.evictable:
                    known.account.evictable.move_to_end(known)
            elif (slot := self._take_slot(account)) is None:
                self.counters["refused_blocks"] += 1
            else:
                self._enter(TierEntry(name, slot, scope, account, departed.used_s))
                copies.append((block, slot))
        self.counters["stored_blocks"] += len(copies)
        self._forget_empty(account)
        return copies

    def forget(self, names: Iterable[bytes]) -> None:
        """Makes these unfindable; their slots are to be erased."""
        for name in names:
            entry = self._entries.get(name)
            if entry is not None:
                self._remove(entry, erase=True)

    def forget_entry(self, entry: TierEntry) -> None:
        """Makes this one unfindable, if it is not already; its slot is to be erased."""
        if self._entries.get(entry.name) is entry:
            self._remove(entry, erase=True)

    def raise_epochs(self, epochs: Mapping[bytes, int]) -> None:
        """Wipes what is of an epoch before these, by account or scope id. O(scopes)."""
        for key, scope in list(self._scopes.items()):
            account = next(iter(scope.entries)).account.name
            if max(epochs.get(account, 0), epochs.get(key[1], 0)) > scope.epoch:
                self._wipe(key)

    def sweep(self, count: int) -> bool:
        """Gives up to so many slots to be erased whose entries are found no more. Returns whether there may be more."""
        now_s, swept = self._clock(), min(count, len(self._wiped))
        for _ in range(swept):
            self._drop(self._wiped.pop())
        while swept < count and (entry := self._expiring.peek()) is not None and entry.expires_s <= now_s:
            self._remove(entry, erase=True)
            swept += 1
        self.counters["swept_blocks"] += swept
        return swept == count

    @property
    def unerased(self) -> bool:
        """Whether there are slots to be erased."""
        return bool(self._unerased)

    def take_unerased(self) -> list[int]:
        """The slots to be erased before anything is copied into one; they count as erased from then on."""
        slots, self._unerased = self._unerased, []
        return [*dict.fromkeys(slots)]

    def check(self) -> None:
        """Raises AssertionError where a slot is lost or has two owners, or a sum is wrong."""
        held = [entry.slot for entry in (*self._entries.values(), *self._wiped, *self._orphans)]
        assert sorted([*held, *self._free]) == list(range(self.slots)), "a slot is lost, or has two owners"
        in_scopes = [entry for scope in self._scopes.values() for entry in scope.entries]
        assert len(in_scopes) == len(set(in_scopes)) == len(self._entries)
        assert all(scope.entries for scope in self._scopes.values()), "an empty scope is kept"
        assert self._floors == sum(account.floor for account in self._accounts.values()) <= self.slots
        for name, entry in self._entries.items():
            assert entry.name == name
            assert entry in entry.scope.entries
            assert entry.pins or not entry.arriving, "what arrives could be evicted"
            assert (entry in entry.account.evictable) == (not entry.pins), "an entry can never be evicted, or is read"
            self._expiring.check(entry)
        for name, account in self._accounts.items():
            assert account.name == name
            assert account.cached == sum(entry.account is account for entry in self._entries.values()) > 0
            pinned = account.cached - len(account.evictable)
            assert account.share.cap is None or account.cached <= max(account.share.cap, pinned)
            self._ranks.check(account)

    # Inside

    def _keep_for(self, scope: _Scope, keep_s: float | None) -> None:
        if scope.keep_s != keep_s:
            scope.keep_s = keep_s
            for entry in scope.entries:
                self._expiring.put(entry)

    def _grant(self, account: _Account) -> None:
        """Holds an account to its share from now on; its floor goes as far as the floors granted before leave slots."""
        floor, cap = account.share
        others = self._floors - account.floor
        account.floor = min(floor if cap is None else min(floor, cap), self.slots - others)
        self._floors = others + account.floor
        self._accounts[account.name] = account
        while cap is not None and account.cached > cap and account.evictable:
            self._evict_from(account)
        self._ranks.put(account)

    def _take_slot(self, account: _Account) -> int | None:
        """A slot for one more block of this account, None where no other gives way."""
        if account.share.cap is not None and account.cached >= account.share.cap:
            if not account.evictable:
                return None
            self._evict_from(account)
        elif not self._free:
            richest = self._ranks.peek()
            if richest is None or (richest is not account and richest.cached <= richest.floor):
                return None
            self._evict_from(richest)
        return self._free.pop() if self._free else None

    def _evict_from(self, account: _Account) -> None:
        self._remove(next(iter(account.evictable)), erase=False)
        self.counters["evicted_blocks"] += 1

    def _enter(self, entry: TierEntry) -> None:
        account, scope = entry.account, entry.scope
        if account.name not in self._accounts:  # it gave up its last entry for this one
            self._grant(account)
        self._entries[entry.name] = entry
        self._scopes[scope.key] = scope
        scope.entries[entry] = None
        account.cached += 1
        account.evictable[entry] = None
        self._expiring.put(entry)
        self._ranks.put(account)

    def _remove(self, entry: TierEntry, erase: bool) -> None:
        """Makes an entry unfindable, and frees its slot."""
        scope = entry.scope
        del scope.entries[entry]
        if not scope.entries:
            del self._scopes[scope.key]
        self._leave(entry)
        if erase:
            self._drop(entry)
        else:
            self._free.append(entry.slot)

    def _leave(self, entry: TierEntry) -> None:
        """Takes an entry off the names and off its account."""
        del self._entries[entry.name]
        entry.account.cached -= 1
        entry.account.evictable.pop(entry, None)
        self._expiring.remove(entry)
        self._forget_empty(entry.account)

    def _drop(self, entry: TierEntry) -> None:
        """Frees the slot of an entry that is gone, to be erased; that of a pinned one once it was read."""
        if entry.pins:
            self._orphans.add(entry)
        else:
            self._release(entry.slot)

    def _release(self, slot: int) -> None:
        self._free.append(slot)
        self._unerased.append(slot)

    def _wipe(self, scope_key: ScopeKey) -> None:
        """Makes a scope's entries unfindable at once; `sweep` gives their slots."""
        for entry in self._scopes.pop(scope_key).entries:
            self._leave(entry)
            self._wiped.append(entry)

    def _forget_empty(self, account: _Account) -> None:
        if not account.cached and self._accounts.get(account.name) is account:
            self._floors -= account.floor
            account.floor = 0
            del self._accounts[account.name]
            self._ranks.remove(account)
