"""Whose turn it is: where every account stands, and the line of those that wait. It does not know what waits, or why.

An account's level is what it was served, per weight, and the lowest goes next. That is the virtual token counter of
Sheng et al. 2024, and not deficit round robin: tokens count as they are computed, so nobody has to guess how long a
generation will be before it has its turn, and long ones count in full. What a running prompt has yet to be given is
promised to it and counts for the next turn only. Who comes, or comes back from its own cap, is lifted to CREDIT below
the least level in the line: its first prompt goes before the others' next ones, but idling saves up no more than that.
Where nobody waits all have had what they asked for, and who comes then is lifted to as much below the greatest.
"""

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, Generic, TypeVar

from engine.protocol.types import SchedulingTerms

# What counts as service: a token of a prompt that was computed, not found in the cache, and one that was generated. A
# generated one takes a step of its own, for which all weights are read: twice as much, as in the counter's paper.
PROMPT_TOKEN: Final = 1
GENERATED_TOKEN: Final = 2
CREDIT: Final = 512  # tokens served that an account may be behind others when it comes
_IDLE_ACCOUNTS_MAX: Final = 4096

Item = TypeVar("Item")


class AccountQueue(Generic[Item]):
    """One account in one replica.

    level      what it was served, divided by its weight: comparable between accounts, not a sum since the start.
    promised   tokens of its running prompts that are still to be computed.
    waiting    its items that never started, and resuming those that were preempted, each with the work it asks for.
    running    how many items of it run.
    readers    for each KV block that those hold how many of them do.
    full       its next item found too few blocks left under its cap; until one of its own ends.
    """

    __slots__ = (
        *("full", "generated_cost", "level", "promised", "prompt_cost", "readers"),
        *("resuming", "running", "terms", "waiting", "work"),
    )

    def __init__(self, terms: SchedulingTerms | None = None) -> None:
        self.level = 0.0
        self.promised = 0
        self.waiting: dict[Item, float] = {}
        self.resuming: dict[Item, float] = {}
        self.work = 0.0
        self.running = 0
        self.readers: dict[int, int] = {}
        self.full = False
        self.agree(terms or SchedulingTerms())

    def agree(self, terms: SchedulingTerms) -> None:
        self.terms = terms
        self.prompt_cost = PROMPT_TOKEN / terms.weight
        self.generated_cost = GENERATED_TOKEN / terms.weight

    @property
    def turn(self) -> float:
        """What decides about its next turn: its level once its running prompts are computed."""
        return self.level + self.promised * self.prompt_cost

    @property
    def wants(self) -> bool:
        """Whether it has something to start, and no cap of its own forbids it."""
        if self.full or not (self.waiting or self.resuming):
            return False
        return self.terms.sequences is None or self.running < self.terms.sequences

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.resuming or self.running or self.readers)

    @property
    def blocks(self) -> int:
        """KV blocks that it holds; one that several of its items read counts once."""
        return len(self.readers)

    def hold(self, blocks: Iterable[int]) -> None:
        readers = self.readers
        for block in blocks:
            readers[block] = readers.get(block, 0) + 1

    def let_go(self, blocks: Iterable[int]) -> None:
        readers = self.readers
        for block in blocks:
            count = readers[block] - 1
            if count:
                readers[block] = count
            else:
                del readers[block]


class FairQueue(Generic[Item]):
    """Items (hashable by identity) waiting under their account, those that were preempted first, by `order`.

    While two accounts both take turns, what they were served for their weight drifts apart by no more than CREDIT, the
    largest prompt of each and what their running items generate. Costs: O(log accounts in line) for the next item and
    for each that is passed over; a scan of the line where an account comes back to it.
    """

    def __init__(self, order: Callable[[Item], int]) -> None:
        self._order = order
        self._standings: dict[bytes, AccountQueue[Item]] = {}
        self._running: dict[AccountQueue[Item], None] = {}
        self._line: dict[AccountQueue[Item], int] = {}  # those that want a turn, and which of their turns counts
        self._turns: list[tuple[float, int, AccountQueue[Item]]] = []  # a heap; the turn as it was when it came in
        self._lined_up = 0
        self._most = 0.0  # no level was above it when nobody waited last
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def line(self) -> Iterable[AccountQueue[Item]]:
        """The accounts that want a turn and may have one."""
        return self._line.keys()

    @property
    def running(self) -> Iterable[AccountQueue[Item]]:
        """The accounts of which something runs."""
        return self._running.keys()

    def standing(self, account: bytes, terms: SchedulingTerms) -> AccountQueue[Item]:
        """Where this account stands, under these terms from now on."""
        standing = self._standings.get(account)
        if standing is None:
            self._forget_idle()
            standing = self._standings[account] = AccountQueue(terms)
        elif standing.terms != terms:
            standing.agree(terms)
            standing.full = False
            self._line.pop(standing, None)
            self._refresh(standing)
        return standing

    def push(self, standing: AccountQueue[Item], item: Item, work: float) -> None:
        """Queues an item behind the others of its account; `work` is what it will be served at most, unweighted."""
        assert item not in standing.waiting, "pushed twice"
        standing.waiting[item] = work
        self._came(standing, work)

    def resume(self, standing: AccountQueue[Item], item: Item, work: float) -> None:
        """Queues an item that was preempted before those of its account that never started. `stop` it first."""
        again = {**standing.resuming, item: work}
        standing.resuming = {each: again[each] for each in sorted(again, key=self._order)}
        self._came(standing, work)

    def first(self, choose: Callable[[AccountQueue[Item]], Item | None]) -> Item | None:
        """What `choose` takes of the first account in line of which it takes anything. It must not change the queue."""
        found, passed = None, []
        while found is None and self._turns:
            turn, number, standing = self._turns[0]
            if self._line.get(standing) != number:
                heappop(self._turns)
            elif turn < standing.turn:  # turns only grow, or are lined up anew: what comes first so is the least
                heapreplace(self._turns, (standing.turn, number, standing))
            elif (found := choose(standing)) is None:
                passed.append(heappop(self._turns))
        for each in passed:
            heappush(self._turns, each)
        return found

    def start(self, standing: AccountQueue[Item], item: Item) -> None:
        """Its turn has come: it runs from now on."""
        standing.running += 1
        self._running[standing] = None
        self.remove(standing, item)

    def remove(self, standing: AccountQueue[Item], item: Item) -> None:
        """Removes an item that no longer waits. KeyError where it does not."""
        queue = standing.resuming if item in standing.resuming else standing.waiting
        standing.work -= queue.pop(item)
        if not (standing.waiting or standing.resuming):
            standing.work = 0.0  # no rounding adds up
        self._length -= 1
        self._refresh(standing)

    def stop(self, standing: AccountQueue[Item]) -> None:
        """One of its items runs no longer."""
        standing.running -= 1
        if not standing.running:
            del self._running[standing]
        self._refresh(standing)

    def let_go(self, standing: AccountQueue[Item], blocks: Iterable[int]) -> None:
        """What an item of it held is no longer its."""
        standing.let_go(blocks)
        standing.full = False
        self._refresh(standing)

    def pass_over(self, standing: AccountQueue[Item]) -> None:
        """Its next item finds too few blocks left under its cap: it has no turn before one of its own stops."""
        assert standing.running, "whoever runs nothing may always start"
        standing.full = True
        self._refresh(standing)

    def promise(self, standing: AccountQueue[Item], tokens: int) -> None:
        """So many tokens of a prompt will be computed, or, if negative, never will."""
        standing.promised += tokens
        if tokens < 0 and standing in self._line:
            self._line_up(standing)

    def ahead(self, standing: AccountQueue[Item], part: float) -> float:
        """What is served before one more item of this account has its turn, where of all work only a part is done."""
        own = part * standing.work
        reached = max(standing.turn, self._floor(standing)) + own / standing.terms.weight
        return own + sum(
            min(part * other.work, max(0.0, reached - other.turn) * other.terms.weight)
            for other in self._line
            if other is not standing
        )

    def longest(self) -> AccountQueue[Item] | None:
        """The account with the most items for its weight that never started, if any has one."""
        waiting = (standing for standing in self._standings.values() if standing.waiting)
        return max(waiting, key=lambda standing: len(standing.waiting) / standing.terms.weight, default=None)

    def _came(self, standing: AccountQueue[Item], work: float) -> None:
        standing.work += work
        self._length += 1
        self._refresh(standing)

    def _refresh(self, standing: AccountQueue[Item]) -> None:
        """In line is who wants a turn."""
        if not standing.wants:
            self._line.pop(standing, None)
        elif standing not in self._line:
            standing.level = max(standing.level, self._floor(standing))
            self._line_up(standing)

    def _floor(self, standing: AccountQueue[Item]) -> float:
        """What an account is lifted to that comes into the line."""
        credit = CREDIT / standing.terms.weight
        if self._line:
            return min(other.level for other in self._line) - credit
        self._most = max(self._most, max((other.level for other in self._standings.values()), default=0.0))
        for account in [key for key, other in self._standings.items() if other.idle and other is not standing]:
            del self._standings[account]  # it would be lifted
        return self._most - credit

    def _line_up(self, standing: AccountQueue[Item]) -> None:
        self._lined_up += 1
        self._line[standing] = self._lined_up
        heappush(self._turns, (standing.turn, self._lined_up, standing))
        if len(self._turns) > 64 + 2 * len(self._line):
            self._turns = [each for each in self._turns if self._line.get(each[2]) == each[1]]
            heapify(self._turns)

    def _forget_idle(self) -> None:
        """Keeps those bounded that neither wait nor run. Below the least level in line a level says nothing."""
        if len(self._standings) < _IDLE_ACCOUNTS_MAX:
            return
        idle = sorted((other.level, account) for account, other in self._standings.items() if other.idle)
        if len(idle) < _IDLE_ACCOUNTS_MAX:
            return
        least = min((other.level for other in self._line), default=0.0)
        behind = sum(level <= least for level, _ in idle)
        for _, account in idle[: max(behind, len(idle) // 2)]:
            del self._standings[account]

    def check(self) -> None:
        standings = self._standings.values()
        assert self._length == sum(len(each.waiting) + len(each.resuming) for each in standings)
        assert {each for each in standings if each.wants} == self._line.keys(), "the line is not of those that want"
        turns = [number for _, number, each in self._turns if self._line.get(each) == number]
        assert sorted(turns) == sorted(self._line.values()), "an account has no turn, or two"
        for each in standings:
            assert min(each.running, each.promised) >= 0
            assert list(each.resuming) == sorted(each.resuming, key=self._order)
            assert abs(each.work - sum([*each.waiting.values(), *each.resuming.values()])) < 1e-6 * (1 + each.work)
        assert self._running.keys() == {each for each in standings if each.running}
        assert sum(each.idle for each in standings) <= _IDLE_ACCOUNTS_MAX


def fair_shares(standings: list[AccountQueue[Item]], wanted: list[int], rows: int) -> list[int]:
    """How many of `rows` each account gets for its prompts: those with the lowest levels, until none of them is below
    another that gets any; none more than it wants. Costs O(accounts · log accounts)."""
    if sum(wanted) <= rows:
        return wanted
    if len(wanted) == 1:
        return [rows]
    level = _water_level(standings, wanted, rows)
    shares = [
        min(count, max(0, int((level - standing.level) / standing.prompt_cost)))
        for standing, count in zip(standings, wanted, strict=True)
    ]
    left = rows - sum(shares)
    for index in sorted(range(len(shares)), key=lambda index: standings[index].level):
        more = min(left, wanted[index] - shares[index])
        shares[index] += more
        left -= more
    return shares


def _water_level(standings: list[AccountQueue[Item]], wanted: list[int], rows: int) -> float:
    """The level that those below it reach together with so many rows, fewer than are wanted."""
    changes = []  # (a level, by how many rows per level more or fewer are taken from there on)
    for standing, count in zip(standings, wanted, strict=True):
        changes.append((standing.level, 1 / standing.prompt_cost))
        changes.append((standing.level + count * standing.prompt_cost, -1 / standing.prompt_cost))
    changes.sort()
    level, rate, left = changes[0][0], 0.0, float(rows)
    for upper, change in changes:
        if left < rate * (upper - level):
            return level + left / rate
        left -= rate * (upper - level)
        level, rate = upper, rate + change
    return level
