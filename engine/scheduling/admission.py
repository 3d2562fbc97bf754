"""Which of an account's waiting sequences may start beside the prompts that run. It does not know whose turn it is, nor
whether there is a place and room in memory.

An account's prompts may use up its own part of a step's rows and no more. Preempted sequences come first. A sequence
that would compute what a running prompt computes steps aside until that is cached.

Where sequences of one namespace wait one behind the other, the one with the longest cached prefix goes first, as in
SGLang's scheduler, so that a prefix is used before it is evicted. Only the next PREFIX_WINDOW are looked at, and none
is passed more than PASSES_MAX times. What is cached never moves one namespace before another: nobody's wait tells what
others have cached.
"""

from array import array
from collections.abc import Callable
from itertools import takewhile
from typing import Final

import numpy as np
from numpy.typing import NDArray

from engine.kv_blocks.prefix_match import PrefixMatch
from engine.kv_blocks.public_prefixes import common_prefix_length
from engine.scheduling.waiting import PASSES_MAX
from engine.sequences.fair_queue import AccountQueue, fair_shares
from engine.sequences.sequence import Sequence, SequenceState
from prefixcache.namespace import Namespace

PREFIX_WINDOW: Final = 16  # waiting sequences of an account among which the longest cached prefix goes first
LOOK_AHEAD: Final = 4  # of these are looked at for one that waits for no prefix


class PrefillAdmission:
    """The running sequences whose prompt is not computed, while others start beside them."""

    def __init__(
        self, running: list[Sequence], rows: int, block_tokens: int, cached_tokens: Callable[[Sequence], int]
    ) -> None:
        """`rows`: what all running sequences have of a step. cached_tokens: of a waiting one, as it would find them."""
        self._rows = rows  # left, beside one for each running sequence
        self._block_tokens = block_tokens
        self._cached_tokens = cached_tokens
        self._cached: dict[Sequence, int] = {}  # what it returned before in this step
        self._oldest: dict[AccountQueue[Sequence], Sequence] = {}
        self._pending: dict[AccountQueue[Sequence], int] = {}
        self._namespaces: dict[Namespace, list[Sequence]] = {}
        for sequence in running:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that started."""
        self._rows -= 1
        if len(sequence.tokens) - sequence.computed <= 1:
            return
        if sequence.namespace is not None:
            self._namespaces.setdefault(sequence.namespace, []).append(sequence)
        if sequence.pending > 1:  # else the rest of its prompt is in flight
            account = sequence.account_queue
            self._pending[account] = self._pending.get(account, 0) + sequence.pending
            if account not in self._oldest or sequence.start_order < self._oldest[account].start_order:
                self._oldest[account] = sequence

    def choose(self, account: AccountQueue[Sequence]) -> Sequence | None:
        """What this account would start if it had its turn."""
        if self._full(account):
            return None
        if account.resuming:
            return next(iter(account.resuming))
        window = self._window(account)
        ready = (sequence for sequence in window[:LOOK_AHEAD] if not self._awaits_prefix(sequence))
        first = next(ready, None)
        if first is None or first.namespace is None:
            return first
        later = window[window.index(first) :]
        return self._longest_cached(list(takewhile(lambda other: other.namespace == first.namespace, later)))

    def _window(self, account: AccountQueue[Sequence]) -> list[Sequence]:
        """The account's next sequences that could start, up to the first one that may not be passed again."""
        window: list[Sequence] = []
        for sequence in account.waiting:
            if not sequence.awaited:
                window.append(sequence)
                if len(window) == PREFIX_WINDOW or sequence.passed == PASSES_MAX:
                    break
        return window

    def _longest_cached(self, sequences: list[Sequence]) -> Sequence:
        """The one with the longest cached prefix that waits for none, the earliest of equal ones; the first waits for
        none."""
        if len(sequences) == 1:
            return sequences[0]
        for sequence in sequences:
            if sequence not in self._cached:
                self._cached[sequence] = self._cached_tokens(sequence)
        ranked = sorted(sequences, key=self._cached.__getitem__, reverse=True)
        return next(other for other in ranked if other is sequences[0] or not self._awaits_prefix(other))

    def _full(self, account: AccountQueue[Sequence]) -> bool:
        """Whether an account's prompts use up its own part of the rows. Half of that belongs to the oldest prompt, as
        far as it needs them."""
        if self._rows <= 0:
            return True
        others = [other for other in self._pending if other is not account]
        requested = [self._rows, *(self._pending[other] for other in others)]
        share = fair_shares([account, *others], requested, self._rows)[0]
        oldest = self._oldest[account].pending if account in self._oldest else 0
        return self._pending.get(account, 0) - oldest >= share - min(oldest, share - share // 2)

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Whether a running prompt is about to cache blocks that this one would otherwise compute again.

        The sequence remembers that prompt, so that whole prompts are not compared in every step.
        """
        if sequence.namespace is None:
            return False
        size = self._block_tokens
        if sequence.prefix_source is not None:
            source, blocks = sequence.prefix_source
            if source.state == SequenceState.RUNNING and source.computed // size < blocks:
                return True
        sequence.prefix_source = None
        for other in self._namespaces.get(sequence.namespace, []):
            next_end = (other.computed // size + 1) * size
            if next_end >= len(sequence.tokens) or next_end > len(other.tokens):
                continue
            if sequence.tokens[next_end - 1] == other.tokens[next_end - 1]:  # else the blocks differ for sure
                common = common_prefix_length(_ids(other.tokens), _ids(sequence.tokens)[:-1])
                if common >= next_end:
                    sequence.prefix_source = other, common // size
                    return True
        return False


def exceeds_cap(account: AccountQueue[Sequence], match: PrefixMatch) -> bool:
    """Whether the missing blocks and the cached ones, and one more for each that runs, pass an account's cap."""
    cap = account.terms.blocks
    if cap is None or not account.running:
        return False
    more = match.missing_blocks + sum(page not in account.readers for page in match.pages)
    return account.blocks + more + account.running > cap


def _ids(tokens: "array[int]") -> NDArray[np.uint32]:
    return np.frombuffer(tokens, np.uint32)
