"""A fair queue of accounts: which of them has its turn next. It does not know what waits, or why.

An account's level is what it was served, per weight, and the lowest goes next. That is the virtual token counter of
Sheng et al. 2024, and not deficit round robin: tokens count as they are computed, so nobody has to guess how long a
generation will be before it has its turn, and long ones count in full. Tokens of a running prompt that are still to be
computed are pending and count for the next turn only. An account that arrives, or comes back from its own cap, is
lifted to CREDIT below the lowest level of those that wait: its first prompt goes before the others' next ones, but
idling saves up no more than that. Where none waits all have had what they requested, and an account that arrives then
is lifted to as much below the highest level.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from engine.protocol.types import SchedulingTerms

# Service is counted in tokens: of prompts those that were computed, not found in the cache, and generated ones. A
# generated token takes a step of its own, for which all weights are read: twice as much, as in the counter's paper.
PROMPT_TOKEN: Final = 1
GENERATED_TOKEN: Final = 2
MASK_US: Final = 100.0  # of masks, for which all wait, count as a token of a prompt
CREDIT: Final = 512  # tokens served that an account may be behind others when it arrives
_IDLE_ACCOUNTS_MAX: Final = 4096

Item = TypeVar("Item")


class AccountQueue(Generic[Item]):
    """One account in one replica.

    level           what it was served, divided by its weight: comparable between accounts, not a sum since the start.
    pending_tokens  of its running prompts, still to be computed.
    waiting         its items that never started, each with the work it requests,
    resuming        and its preempted ones, in the same way.
    running         how many items of it run.
    readers         how many of these hold each KV page.
    at_cap          its next item found too few blocks left under its cap; until one of its own ends.
    """

    __slots__ = (
        *("at_cap", "generated_cost", "level", "mask_cost", "pending_tokens", "prompt_cost", "readers"),
        *("resuming", "running", "terms", "waiting", "work"),
    )

    def __init__(self, terms: SchedulingTerms | None = None) -> None:
        self.level = 0.0
        self.pending_tokens = 0
        self.waiting: dict[Item, float] = {}
        self.resuming: dict[Item, float] = {}
        self.work = 0.0
        self.running = 0
        self.readers: dict[int, int] = {}
        self.at_cap = False
        self.set_terms(terms or SchedulingTerms())

    def set_terms(self, terms: SchedulingTerms) -> None:
        self.terms = terms
        self.prompt_cost = PROMPT_TOKEN / terms.weight
        self.generated_cost = GENERATED_TOKEN / terms.weight
        self.mask_cost = PROMPT_TOKEN / (MASK_US * terms.weight)  # of a µs

    @property
    def priority(self) -> float:
        """Its level once its running prompts are computed. The account with the lowest goes next."""
        return self.level + self.pending_tokens * self.prompt_cost

    @property
    def is_eligible(self) -> bool:
        """Whether it has something to start, and no cap of its own forbids it."""
        if self.at_cap or not (self.waiting or self.resuming):
            return False
        return self.terms.sequences is None or self.running < self.terms.sequences

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.resuming or self.running or self.readers)

    @property
    def blocks(self) -> int:
        """KV blocks that it holds; a block that several of its items read counts once."""
        return len(self.readers)

    def add_blocks(self, pages: Iterable[int]) -> None:
        readers = self.readers
        for page in pages:
            readers[page] = readers.get(page, 0) + 1

    def remove_blocks(self, pages: Iterable[int]) -> None:
        readers = self.readers
        for page in pages:
            count = readers[page] - 1
            if count:
                readers[page] = count
            else:
                del readers[page]


class FairQueue(Generic[Item]):
    """Items (hashable by identity) that wait under their account, preempted ones first, by `order`.

    While two accounts both take turns, what they were served for their weight drifts apart by no more than CREDIT, the
    largest prompt of each and what their running items generate. Costs: O(log eligible accounts) for the next item and
    for each account that is skipped; a scan of them where an account becomes eligible.

    running_accounts  the accounts of which something runs.
    eligible          the accounts that wait for a turn and may have one, each with the number of the heap's entry that
                      counts.
    """

    def __init__(self, order: Callable[[Item], int]) -> None:
        self._order = order
        self._accounts: dict[bytes, AccountQueue[Item]] = {}
        self.running_accounts: dict[AccountQueue[Item], None] = {}
        self.eligible: dict[AccountQueue[Item], int] = {}
        self._heap: list[tuple[float, int, AccountQueue[Item]]] = []  # the priority as it was when it was pushed
        self._pushed = 0
        self._max_level = 0.0  # no level was above it when none waited last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def account_queue(self, name: bytes, terms: SchedulingTerms) -> AccountQueue[Item]:
        """The account's queue, under these terms from now on."""
        account = self._accounts.get(name)
        if account is None:
            self._drop_idle()
            account = self._accounts[name] = AccountQueue(terms)
        elif account.terms != terms:
            account.set_terms(terms)
            account.at_cap = False
            self.eligible.pop(account, None)
            self._refresh(account)
        return account

    def push(self, account: AccountQueue[Item], item: Item, work: float) -> None:
        """Queues an item behind the others of its account; `work` is what it will be served at most, unweighted."""
        assert item not in account.waiting, "pushed twice"
        account.waiting[item] = work
        self._joined(account, work)

    def resume(self, account: AccountQueue[Item], item: Item, work: float) -> None:
        """Queues a preempted item, before those of its account that never started. `stop` comes first."""
        again = {**account.resuming, item: work}
        account.resuming = {queued: again[queued] for queued in sorted(again, key=self._order)}
        self._joined(account, work)

    def peek(self, choose: Callable[[AccountQueue[Item]], Item | None]) -> Item | None:
        """The item that `choose` returns for the first eligible account for which it returns any. It must not change
        the queue."""
        item, skipped = None, []
        while item is None and self._heap:
            priority, number, account = self._heap[0]
            if self.eligible.get(account) != number:
                heappop(self._heap)
            elif priority < account.priority:  # one only grows, or is pushed anew: the first current one is the least
                heapreplace(self._heap, (account.priority, number, account))
            elif (item := choose(account)) is None:
                skipped.append(heappop(self._heap))
        for entry in skipped:
            heappush(self._heap, entry)
        return item

    def start(self, account: AccountQueue[Item], item: Item) -> None:
        """Takes an item out of the queue: it runs from now on."""
        account.running += 1
        self.running_accounts[account] = None
        self.remove(account, item)

    def remove(self, account: AccountQueue[Item], item: Item) -> None:
        """Removes an item that no longer waits. KeyError where it does not."""
        queue = account.resuming if item in account.resuming else account.waiting
        account.work -= queue.pop(item)
        if not (account.waiting or account.resuming):
            account.work = 0.0  # no rounding adds up
        self._length -= 1
        self._refresh(account)

    def stop(self, account: AccountQueue[Item]) -> None:
        """Notes that an item of the account runs no longer."""
        account.running -= 1
        if not account.running:
            del self.running_accounts[account]
        self._refresh(account)

    def remove_blocks(self, account: AccountQueue[Item], pages: Iterable[int]) -> None:
        """Takes pages that an item held off its account, which may have a turn under its cap again."""
        account.remove_blocks(pages)
        account.at_cap = False
        self._refresh(account)

    def skip(self, account: AccountQueue[Item]) -> None:
        """Notes that the account's next item finds too few blocks under its cap: no turn until one of its own ends."""
        assert account.running, "an account that runs nothing may always start"
        account.at_cap = True
        self._refresh(account)

    def add_pending(self, account: AccountQueue[Item], tokens: int) -> None:
        """Adds tokens of a prompt that will be computed; a negative number: that never will."""
        account.pending_tokens += tokens
        if tokens < 0 and account in self.eligible:
            self._push(account)

    def work_ahead(self, account: AccountQueue[Item], done_share: float) -> float:
        """What is served before one more item of this account has its turn, where only a share of all work is done."""
        own = done_share * account.work
        level = max(account.priority, self._entry_level(account)) + own / account.terms.weight
        return own + sum(
            min(done_share * other.work, max(0.0, level - other.priority) * other.terms.weight)
            for other in self.eligible
            if other is not account
        )

    def longest_account(self) -> AccountQueue[Item] | None:
        """The account with the most items for its weight that never started, if any has one."""
        waiting = (account for account in self._accounts.values() if account.waiting)
        return max(waiting, key=lambda account: len(account.waiting) / account.terms.weight, default=None)

    def _joined(self, account: AccountQueue[Item], work: float) -> None:
        account.work += work
        self._length += 1
        self._refresh(account)

    def _refresh(self, account: AccountQueue[Item]) -> None:
        """Makes an account eligible, or no longer."""
        if not account.is_eligible:
            self.eligible.pop(account, None)
        elif account not in self.eligible:
            account.level = max(account.level, self._entry_level(account))
            self._push(account)

    def _entry_level(self, account: AccountQueue[Item]) -> float:
        """The level that an account is lifted to when it becomes eligible."""
        credit = CREDIT / account.terms.weight
        if self.eligible:
            return min(other.level for other in self.eligible) - credit
        self._max_level = max(self._max_level, max((other.level for other in self._accounts.values()), default=0.0))
        for name in [name for name, other in self._accounts.items() if other.is_idle and other is not account]:
            del self._accounts[name]  # it would be lifted
        return self._max_level - credit

    def _push(self, account: AccountQueue[Item]) -> None:
        self._pushed += 1
        self.eligible[account] = self._pushed
        heappush(self._heap, (account.priority, self._pushed, account))
        if len(self._heap) > 64 + 2 * len(self.eligible):
            self._heap = [entry for entry in self._heap if self.eligible.get(entry[2]) == entry[1]]
            heapify(self._heap)

    def _drop_idle(self) -> None:
        """Bounds the number of idle accounts. Below the lowest level of the eligible ones a level says nothing."""
        if len(self._accounts) < _IDLE_ACCOUNTS_MAX:
            return
        idle = sorted((other.level, name) for name, other in self._accounts.items() if other.is_idle)
        if len(idle) < _IDLE_ACCOUNTS_MAX:
            return
        lowest = min((other.level for other in self.eligible), default=0.0)
        below = sum(level <= lowest for level, _ in idle)
        for _, name in idle[: max(below, len(idle) // 2)]:
            del self._accounts[name]

    def check(self) -> None:
        accounts = self._accounts.values()
        assert self._length == sum(len(account.waiting) + len(account.resuming) for account in accounts)
        assert self.eligible.keys() == {account for account in accounts if account.is_eligible}, "the wrong ones wait"
        numbers = [number for _, number, account in self._heap if self.eligible.get(account) == number]
        assert sorted(numbers) == sorted(self.eligible.values()), "an account has no turn, or two"
        for account in accounts:
            assert min(account.running, account.pending_tokens) >= 0
            assert list(account.resuming) == sorted(account.resuming, key=self._order)
            work = sum([*account.waiting.values(), *account.resuming.values()])
            assert abs(account.work - work) < 1e-6 * (1 + account.work)
        assert self.running_accounts.keys() == {account for account in accounts if account.running}
        assert sum(account.is_idle for account in accounts) <= _IDLE_ACCOUNTS_MAX


def fair_shares(accounts: list[AccountQueue[Item]], requested: list[int], rows: int) -> list[int]:
    """How many of `rows` each account gets for its prompts: those with the lowest levels, until none of them is below
    another that gets any; none more than it requests. Costs O(accounts · log accounts)."""
    if sum(requested) <= rows:
        return requested
    if len(requested) == 1:
        return [rows]
    level = _water_level(accounts, requested, rows)
    shares = [
        min(count, max(0, int((level - account.level) / account.prompt_cost)))
        for account, count in zip(accounts, requested, strict=True)
    ]
    left = rows - sum(shares)
    for index in sorted(range(len(shares)), key=lambda index: accounts[index].level):
        more = min(left, requested[index] - shares[index])
        shares[index] += more
        left -= more
    return shares


def _water_level(accounts: list[AccountQueue[Item]], requested: list[int], rows: int) -> float:
    """The level that the accounts below it reach together with so many rows, fewer than are requested."""
    changes = []  # (a level, by how many rows per level more or fewer are taken from there on)
    for account, count in zip(accounts, requested, strict=True):
        changes.append((account.level, 1 / account.prompt_cost))
        changes.append((account.level + count * account.prompt_cost, -1 / account.prompt_cost))
    changes.sort()
    level, rate, left = changes[0][0], 0.0, float(rows)
    for upper, change in changes:
        if left < rate * (upper - level):
            return level + left / rate
        left -= rate * (upper - level)
        level, rate = upper, rate + change
    return level
