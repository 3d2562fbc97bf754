"""Which running sequence gives up its blocks or its place for another one. It decides, and changes nothing.

The oldest running sequence is never preempted, so that every step brings it nearer to its end. Sequences are given by
`start_order`.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Final

from engine.sequences.fair_queue import AccountQueue
from engine.sequences.sequence import Sequence

PREEMPTION_RATIO: Final = 2.0  # for its weight an account keeps so many times as much as the one that it gives way to

Account = AccountQueue[Sequence]


def victim_under_cap(running: Items[Sequence], account: Account) -> Sequence:
    """The youngest sequence of an account that has reached its cap of blocks."""
    return next(sequence for sequence in reversed(running) if sequence.account_queue is account)


def victim_of_shortage(running: Items[Sequence]) -> Sequence:
    """The youngest sequence of the account that holds most blocks for its weight."""
    return max(running[1:], key=lambda sequence: (_blocks(sequence.account_queue), sequence.start_order))


def victim_for_turn(
    running: Items[Sequence], accounts: Iterable[Account], account: Account, missing_blocks: int | None
) -> Sequence | None:
    """The sequence to preempt so that the next one of `account` can start: the youngest of the account that has most
    for its weight of what is missing, if that account keeps PREEMPTION_RATIO times as much as this one then has; None
    where no account gives way. missing_blocks: None where a place is missing.

    What changes hands would have to double before it changes back, so that two accounts never take turns in preempting
    each other. A sequence in a step in flight is chosen only where its account has no other.
    """
    share: Callable[[Account], float] = _places if missing_blocks is None else _blocks
    richest = max(accounts, key=share, default=account)
    needed = share(account) + (missing_blocks or 1) / account.terms.weight
    if richest is account or share(richest) < PREEMPTION_RATIO * needed:
        return None
    own = [sequence for sequence in running[1:] if sequence.account_queue is richest]
    victim = max(own, key=lambda sequence: (not sequence.inflight_steps, sequence.start_order), default=None)
    if victim is None:
        return None
    released = 1 if missing_blocks is None else victim.block_count
    left = share(richest) - released / richest.terms.weight
    return victim if left >= PREEMPTION_RATIO * needed else None


def _blocks(account: Account) -> float:
    return account.blocks / account.terms.weight


def _places(account: Account) -> float:
    return account.running / account.terms.weight
