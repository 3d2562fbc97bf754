"""The sequences that run, and the steps in flight that compute them. It does not know why a sequence starts or stops.

A sequence that ends while a step in flight still reads its blocks keeps them until that step has landed.
"""

from bisect import insort
from collections import Counter, deque
from itertools import chain

from engine.kv_blocks.kv_manager import KVManager
from engine.scheduling.disk_reads import DiskReads
from engine.scheduling.step_plan import StepPlan
from engine.scheduling.waiting import WaitingQueue, start_order_of
from engine.sequences.prompt_images import fit_chunks
from engine.sequences.sequence import Sequence, SequenceState


class RunningSequences:
    """Every sequence that holds blocks.

    sequences    those that run, by `start_order`.
    best_effort  how many of them are background sequences.
    inflight     steps that were launched and have not landed, oldest first.
    disk_reads   of those that wait for their turn.
    loading      those, ended ones too, whose blocks are on their way from the host.
    """

    def __init__(self, kv: KVManager, waiting: WaitingQueue) -> None:
        self.sequences: list[Sequence] = []
        self.best_effort = 0
        self.inflight: deque[StepPlan] = deque()
        self.loading: set[Sequence] = set()
        self.disk_reads = DiskReads(kv, waiting)
        self._kv = kv
        self._waiting = waiting
        self._ended: set[Sequence] = set()  # ended, and in a step in flight

    def add(self, sequence: Sequence) -> None:
        """Lets a sequence run that holds its blocks. What is left of its prompt counts for its account's next turn."""
        found = sequence.computed + sequence.loading_blocks * self._kv.block_tokens
        sequence.charged_tokens = max(sequence.charged_tokens, min(found, sequence.prompt_tokens))
        pending = sequence.prompt_tokens - sequence.charged_tokens
        self._waiting.queue_of(sequence).add_pending(sequence.account_queue, pending)
        insort(self.sequences, sequence, key=start_order_of)
        self.best_effort += sequence.background
        if sequence.loading_blocks:
            self.loading.add(sequence)
            sequence.inflight_steps += 1

    def take_arrived(self) -> bool:
        """Lets sequences run whose blocks have come, from the host or another replica. Returns whether one reads
        others' blocks for its own."""
        return any([self._arrive(each) for each in self._kv.take_arrived()])

    def _arrive(self, sequence: Sequence) -> bool:
        """A sequence's blocks are there. Returns as KVManager.arrive does."""
        self.loading.remove(sequence)
        sequence.inflight_steps -= 1
        if sequence.state != SequenceState.ENDED:
            return self._kv.arrive(sequence, bool(self.inflight))
        self._release(sequence)
        return False

    def append_blocks(self, best_effort: bool) -> Sequence | None:
        """Gives a block to each sequence that needs one, the oldest first, background ones last and only where they may
        run. Returns the first that gets none: a pool is empty, or its account has reached its cap, which does not stop
        a sequence that runs alone in it."""
        kv, growing = self._kv, self.sequences
        if self.best_effort:
            growing = [sequence for sequence in self.sequences if not sequence.background]
            if best_effort:
                growing += [sequence for sequence in self.sequences if sequence.background]
        size, windowed = kv.block_tokens, bool(kv.windowed)
        for sequence in growing:
            while (
                sequence.launched >= (room := sequence.block_count * size) or len(sequence.tokens) > room
            ) and sequence.launchable:
                account = sequence.account_queue
                cap = account.terms.blocks
                if not kv.available_blocks or (cap is not None and account.running > 1 and account.blocks >= cap):
                    return sequence
                kv.append_block(sequence)
            if windowed and sequence.launchable and kv.cover(sequence, sequence.launched + 1) <= sequence.launched:
                return sequence
        return None

    def ready(self) -> list[Sequence]:
        """The sequences of which a step can compute more."""
        return [
            each for each in self.sequences
            if each.launchable and not each.loading_blocks and not (each.images and each.awaits_image)
        ]  # fmt: skip

    def fit_images(
        self, sequences: list[Sequence], chunks: list[int], max_rows: int
    ) -> tuple[list[Sequence], list[int]]:
        """The sequences of a step that have blocks and rows for whole images, and their chunks."""
        if not any([sequence.images for sequence in sequences]):
            return sequences, chunks
        return fit_chunks(
            sequences, chunks, max_rows, lambda each, rows: self._kv.cover(each, each.launched + rows) - each.launched
        )

    @property
    def stuck(self) -> bool:
        """Whether none of several can go on, though an image of one is encoded: only blocks are missing."""
        waiting = self.inflight or self.loading or len(self.sequences) < 2
        return not waiting and any(each.images and each.cut_at_images(1)[0] > 1 for each in self.ready())

    def cover(self, sequence: Sequence, chunk: int) -> int:
        """How much of a chunk the sequence has windowed blocks for, where each that runs keeps its next one."""
        if chunk == 1 or not self._kv.windowed:
            return chunk
        return self._kv.cover(sequence, sequence.launched + chunk, len(self.sequences)) - sequence.launched

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
        self._kv.published.note(sequence, self._kv.cached_tokens)
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
        if self._kv.host is not None:
            self._kv.host.check()
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
        launches.update(self.loading)
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
