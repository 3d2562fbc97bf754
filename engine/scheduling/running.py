"""The sequences that run, and the steps in flight that compute them. It does not know why a sequence starts or stops.

A sequence that ends while a step in flight still reads its blocks keeps them until that step has landed.
"""

from bisect import insort
from collections import Counter, deque
from itertools import chain

from engine.scheduling.kv_manager import KVManager
from engine.scheduling.sequence import Sequence, SequenceState
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.waiting import WaitingQueue, start_order_of


class RunningSequences:
    """Every sequence that holds blocks.

    sequences    those that run, by `start_order`.
    best_effort  how many of them are background sequences.
    inflight     steps that were launched and have not landed, oldest first.
    """

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self.sequences: list[Sequence] = []
        self.best_effort = 0
        self.inflight: deque[StepPlan] = deque()
        self._kv = kv
        self._waiting = waiting
        self._ended: set[Sequence] = set()  # ended, and in a step in flight

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence run that holds its blocks. What is left of its prompt counts for its account's next turn."""
        sequence.charged_tokens = max(sequence.charged_tokens, min(sequence.computed, sequence.prompt_tokens))
        pending = sequence.prompt_tokens - sequence.charged_tokens
        self._waiting.queue_of(sequence).add_pending(sequence.account_queue, pending)
        insort(self.sequences, sequence, key=start_order_of)
        self.best_effort += sequence.background

    def preempt(self, sequence: Sequence) -> None:
        """Takes the blocks of a sequence that is in no step in flight, and queues it again. Its cached blocks may
        stay in the tree."""
        assert sequence.state == SequenceState.RUNNING
        assert not sequence.inflight_steps
        self._remove(sequence)
        self._release(sequence)
        self._waiting.resume(sequence)

    def end(self, sequence: Sequence) -> None:
        """Ends a sequence, waiting or running. The blocks of one in flight are freed once its last step has landed."""
        if sequence.state == SequenceState.RUNNING:
            self._remove(sequence)
        self._waiting.remove(sequence)
        if sequence.inflight_steps:
            self._ended.add(sequence)
        else:
            self._release(sequence)

    def land(self, plan: StepPlan) -> None:
        """Takes the oldest step in flight off; frees the blocks that only it still read."""
        assert self.inflight.popleft() is plan, "steps land in the order of their launch"
        self._kv.free_deferred()
        for sequence in plan.sequences:
            sequence.inflight_steps -= 1
            if sequence.state == SequenceState.ENDED and not sequence.inflight_steps:
                self._release(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Frees a sequence's place, and takes what is left of its prompt off its account."""
        self.sequences.remove(sequence)
        self.best_effort -= sequence.background
        queue = self._waiting.queue_of(sequence)
        queue.add_pending(sequence.account_queue, sequence.charged_tokens - sequence.prompt_tokens)
        queue.stop(sequence.account_queue)

    def _release(self, sequence: Sequence) -> None:
        """Gives back a sequence's lease and its private blocks; cached ones stay in the tree."""
        self._ended.discard(sequence)
        if sequence.block_count:
            self._waiting.queue_of(sequence).remove_blocks(sequence.account_queue, sequence.held_pages())
        self._kv.release(sequence)

    def check(self) -> None:
        """Every block has one owner, steps in flight and sequences agree, and so do accounts and their sequences."""
        holding = [*self.sequences, *self._ended]
        assert self._kv.holders.keys() == set(holding), "blocks are held by a sequence that does not run"
        self._kv.check(in_flight=bool(self.inflight))
        assert self.best_effort == sum(sequence.background for sequence in self.sequences)
        assert self.sequences == sorted(self.sequences, key=start_order_of)
        waiting = len(self._waiting.live) + len(self._waiting.best_effort)
        assert len(self._waiting.sequences) == waiting + len(self.sequences)
        self._check_inflight(holding)
        self._check_accounts(holding)

    def _check_inflight(self, holding: list[Sequence]) -> None:
        launches, chunks = Counter[Sequence](), Counter[Sequence]()
        for plan in self.inflight:
            launches.update(plan.sequences)
            chunks.update(dict(zip(plan.sequences, plan.chunks, strict=True)))
        assert all(launches[sequence] == sequence.inflight_steps for sequence in holding)
        assert launches.keys() <= set(holding), "a sequence in flight holds no blocks"
        assert all(sequence.inflight_steps for sequence in self._ended), "an ended sequence is never released"
        for sequence in self.sequences:
            assert sequence.launched == sequence.computed + chunks[sequence]
            room = sequence.block_count * self._kv.block_tokens
            assert sequence.launched <= min(len(sequence.tokens) + 1, room)

    def _check_accounts(self, holding: list[Sequence]) -> None:
        """What accounts count as theirs is what their sequences hold and have yet to compute."""
        accounts = {sequence.account_queue for sequence in self._waiting.sequences.values()}
        for account in accounts:
            own = [sequence for sequence in self.sequences if sequence.account_queue is account]
            assert account.running == len(own)
            assert account.pending_tokens == sum(sequence.prompt_tokens - sequence.charged_tokens for sequence in own)
        for account in accounts | {sequence.account_queue for sequence in holding}:
            pages = [sequence.held_pages() for sequence in holding if sequence.account_queue is account]
            assert account.readers == Counter(chain.from_iterable(pages))
