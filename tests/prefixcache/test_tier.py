"""The index of a tier: lives at random beside a model that is too simple to be wrong, and what bounds each account."""

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from prefixcache.namespace import CacheShare, Namespace, RetentionPolicy
from prefixcache.tier import KEEP_S_MAX, DepartedBlocks, TierEntry, TierIndex

ACCOUNTS = {b"1" * 16: b"a", b"2" * 16: b"b", b"3" * 16: b"a", b"4" * 16: b"c"}
SHARES = [CacheShare(), CacheShare(3), CacheShare(5, 8), CacheShare(0, 4), CacheShare(100)]
POLICY = RetentionPolicy(b"a")


def space(scope: bytes = b"1" * 16, epoch: int = 0) -> Namespace:
    return Namespace("m", "", "t", "kv", 4, 2, scope, epoch)


def run_of(names: list[bytes], policy: RetentionPolicy = POLICY, epoch: int = 0) -> DepartedBlocks:
    return DepartedBlocks(space(epoch=epoch), policy, 0.0, names, list(range(len(names))))


def word(number: int) -> bytes:
    return number.to_bytes(32, "big")


@dataclass(eq=False)
class Known:
    """What the model knows of one name."""

    scope: bytes
    account: bytes
    used_s: float
    turn: int  # when it became the last to be evicted
    pins: int = 0


class Model:
    """One life: names are found that should be, and an entry that gave way was the least recently used of the account
    furthest above its floor."""

    def __init__(self, seed: int) -> None:
        self.pick = random.Random(seed)
        self.seconds = 0.0
        self.slots = self.pick.choice([0, 3, 12, 40])
        self.index = TierIndex(self.slots, lambda: self.seconds)
        self.known: dict[bytes, Known] = {}
        self.epochs = dict.fromkeys(ACCOUNTS, 0)
        self.shares = {account: self.pick.choice(SHARES) for account in ACCOUNTS.values()}
        self.keeps_s = {scope: self.pick.choice([None, None, 20.5]) for scope in ACCOUNTS}
        self.told_s: dict[bytes, float | None] = {}
        self.leases: list[list[TierEntry]] = []
        self.turn = 0
        self.seen: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        doings = [self.offer] * 12 + [self.find] * 8 + [self.unpin] * 6 + [self.sweep] * 3
        doings += [self.forget, self.raise_epoch, self.raise_epochs, self.change, self.grow]
        for _ in range(300):
            self.seconds += self.pick.randrange(3)
            self.pick.choice(doings)()
            self.compare()
        return self.seen

    def compare(self) -> None:
        self.index.check()
        assert self.index._entries.keys() == self.known.keys()
        slots = [entry.slot for entries in self.leases for entry in entries]
        assert not set(slots) & set(self.index._free), "a slot that is read is given on"

    def names(self, scope: bytes, count: int) -> list[bytes]:
        start = self.pick.randrange(12)
        return [scope + self.epochs[scope].to_bytes(8, "big") + word(start + at)[24:] for at in range(count)]

    def over(self, known: Known) -> bool:
        keep_s = self.told_s[known.scope]
        return known.used_s + (KEEP_S_MAX if keep_s is None else keep_s) <= self.seconds

    def floors(self) -> dict[bytes, int]:
        return {name: account.floor for name, account in self.index._accounts.items()}

    def offer(self) -> None:
        """A block alone: whoever gave way is known then."""
        scope = self.pick.choice(sorted(ACCOUNTS))
        account, share = ACCOUNTS[scope], self.shares[ACCOUNTS[scope]]
        (name,) = self.names(scope, 1)
        before, free = dict(self.known), len(self.index._free)
        policy = RetentionPolicy(account, share, self.keeps_s[scope])
        copies = self.index.offer(DepartedBlocks(space(scope, self.epochs[scope]), policy, self.seconds, [name], [77]))
        self.told_s[scope] = policy.keep_s
        self.turn += 1
        lost = [known for known in before if known not in self.index._entries]
        gave_way = [self.known[each] for each in lost]
        if name in before and not copies:
            before[name].used_s = self.seconds
            before[name].turn = self.turn
        elif copies:
            assert copies[0][0] == 77
            gave_way += [before[name]] if name in before else []  # to a lower cap, and it is back
            before[name] = Known(scope, account, self.seconds, self.turn)
        self.must_have_given_way(account, share, gave_way, free, bool(copies))
        self.known = {each: known for each, known in before.items() if each not in lost}
        self.seen.update(copies=len(copies), lost=len(lost), refused=not copies and name not in before)

    def must_have_given_way(
        self, account: bytes, share: CacheShare, lost: list[Known], free: int, copied: bool
    ) -> None:
        counts = Counter(known.account for known in self.known.values())
        for each in lost:
            own = [known for known in self.known.values() if known.account == each.account and not known.pins]
            assert all(known in lost or known.turn > each.turn for known in own), "not the least recently used"
        if not copied or not lost or any(each.account == account for each in lost):
            return
        assert not free
        floors = self.floors()
        (gave,) = lost
        excess = counts[gave.account] - floors.get(gave.account, 0)
        assert excess > 0, "one lost what its floor covers"
        idle = {known.account for known in self.known.values() if not known.pins}
        assert all(counts[other] - floors.get(other, 0) <= excess for other in idle), "another had more to give"

    def find(self) -> None:
        scope = self.pick.choice(sorted(ACCOUNTS))
        policy = RetentionPolicy(ACCOUNTS[scope], self.shares[ACCOUNTS[scope]], self.keeps_s[scope])
        names = self.names(scope, self.pick.randrange(1, 6))
        there = any(known.scope == scope for known in self.known.values())
        assert self.index.has_scope(space(scope, self.epochs[scope]), policy) == there
        self.told_s[scope] = policy.keep_s
        late = space(scope, self.epochs[scope] - 1)
        assert not self.index.has_scope(late, policy), "a late lookup finds what is newer"
        expected = []
        for name in names:
            if name not in self.known or self.over(self.known[name]):
                break
            expected.append(name)
        found = self.index.find(names) if there else []
        assert [entry.name for entry in found] == expected
        self.seen["found"] += len(found)
        self.index.pin(found)
        self.leases.append(found)
        for entry in found:
            self.known[entry.name].pins += 1
            self.known[entry.name].used_s = self.seconds

    def unpin(self) -> None:
        if not self.leases:
            return
        entries = self.leases.pop(self.pick.randrange(len(self.leases)))
        self.index.unpin(entries)
        for entry in reversed(entries):
            known = self.known.get(entry.name)
            if known is not None and self.index._entries[entry.name] is entry:
                self.turn += 1
                known.pins -= 1
                known.turn = self.turn

    def sweep(self) -> None:
        wiped, over = len(self.index._wiped), [name for name, known in self.known.items() if self.over(known)]
        self.index.sweep(100)
        assert not self.index._wiped
        self.known = {name: known for name, known in self.known.items() if name not in over}
        erased = self.index.take_unerased()
        assert len(set(erased)) == len(erased)
        self.seen.update(wiped=wiped, over=len(over), erased=len(erased))

    def forget(self) -> None:
        names = self.pick.sample(sorted(self.known), min(len(self.known), 2))
        self.index.forget([*names, b"unknown"])
        for name in names:
            del self.known[name]

    def raise_epoch(self) -> None:
        """The next lookup or block of the scope says so: here at once."""
        scope = self.pick.choice(sorted(ACCOUNTS))
        self.epochs[scope] += 1
        self.index.has_scope(space(scope, self.epochs[scope]), RetentionPolicy(ACCOUNTS[scope]))
        self.known = {name: known for name, known in self.known.items() if known.scope != scope}

    def raise_epochs(self) -> None:
        """An account's epoch ends what is before it in all its scopes, without a lookup."""
        account = self.pick.choice(sorted(set(ACCOUNTS.values())))
        own = [scope for scope, owner in ACCOUNTS.items() if owner == account]
        for scope in own:
            self.epochs[scope] = max(self.epochs[other] for other in own) + 1
        self.index.raise_epochs({account: self.epochs[own[0]]})
        self.known = {name: known for name, known in self.known.items() if known.account != account}

    def change(self) -> None:
        self.shares[self.pick.choice(sorted(self.shares))] = self.pick.choice(SHARES)
        self.keeps_s[self.pick.choice(sorted(ACCOUNTS))] = self.pick.choice([None, 5.5, 40.5])

    def grow(self) -> None:
        self.index.add_slots(self.pick.randrange(4))


def test_any_life_of_the_index_agrees_with_the_model() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        try:
            seen += Model(seed).run()
        except BaseException:
            print(f"seed {seed}")
            raise
    for what in ("copies", "lost", "refused", "found", "wiped", "over", "erased"):
        assert seen[what] > 50, f"{what}: {seen[what]}"


def test_a_flood_leaves_a_floor_and_a_cap_is_kept() -> None:
    index = TierIndex(16, lambda: 0.0)
    quiet, flooding = RetentionPolicy(b"q", CacheShare(floor=6)), RetentionPolicy(b"f", CacheShare(cap=12))
    index.offer(run_of([word(number) for number in range(6)], quiet))
    for start in range(100, 400, 10):
        index.offer(run_of([word(start + number) for number in range(10)], flooding))
        index.check()
    assert len(index.find(word(number) for number in range(6))) == 6
    index.offer(run_of([word(500)], RetentionPolicy(b"f", CacheShare(cap=2))))
    assert index.cached == 6 + 2


def test_what_leads_to_other_blocks_is_evicted_after_them() -> None:
    index = TierIndex(4, lambda: 0.0)
    index.offer(run_of([word(number) for number in range(4)]))
    index.offer(run_of([word(9)], RetentionPolicy(b"b")))
    assert len(index.find(word(number) for number in range(4))) == 3
    index.pin(found := index.find(word(number) for number in range(3)))
    index.unpin(found)
    index.offer(run_of([word(10)], RetentionPolicy(b"b")))
    assert len(index.find(word(number) for number in range(4))) == 2


@pytest.mark.parametrize("keep_s", [None, 30.0])
def test_what_nobody_used_for_so_long_is_not_found_and_its_slot_is_erased(keep_s: float | None) -> None:
    clock = [0.0]
    index = TierIndex(4, lambda: clock[0])
    index.offer(run_of([word(1), word(2)], RetentionPolicy(b"a", keep_s=keep_s)))
    over_s = keep_s or KEEP_S_MAX
    clock[0] = over_s - 1
    index.pin(found := index.find([word(1)]))
    index.unpin(found)
    clock[0] = over_s
    assert index.find([word(2)]) == []
    assert len(index.find([word(1)])) == 1, "a use refreshes it"
    assert not index.sweep(8)
    assert len(index.take_unerased()) == 1
    clock[0] += over_s
    index.sweep(8)
    assert index.cached == 0


def test_a_raised_epoch_is_swept_and_what_is_read_meanwhile_is_erased_when_it_was() -> None:
    index = TierIndex(4, lambda: 0.0)
    index.offer(run_of([word(1), word(2)]))
    index.pin(reading := index.find([word(1)]))
    assert not index.has_scope(space(epoch=1), RetentionPolicy(b"a"))
    assert index.find([word(1), word(2)]) == []
    index.sweep(8)
    assert len(index.take_unerased()) == 1
    index.check()
    index.unpin(reading)
    assert index.take_unerased() == [reading[0].slot]
    assert index.offer(run_of([word(3)], epoch=0)), "a scope of which nothing is here has no epoch"
    index.offer(run_of([word(4)], epoch=2))
    assert index.offer(run_of([word(5)], epoch=1)) == [], "a late block is kept"
    index.check()
