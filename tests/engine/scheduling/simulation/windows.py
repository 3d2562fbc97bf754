"""A windowed group's memory in the simulation: every slot says which sequence wrote it, for which position, and what a
row of a layer would see is checked slot by slot."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from engine.kv_blocks.block_pool import BlockPool, blocks_of
from engine.scheduling.step_plan import StepPlan
from engine.sequences.sequence import Sequence
from engine.step.executor import PagedLayout
from engine.step.key_span import KeySpan
from engine.step.layout import StepBatch, unpack_step
from tests.support.stamp_engine import read_table

Slot = tuple[Sequence, int] | None  # who wrote it, for which position


@dataclass(frozen=True, slots=True)
class WindowSize:
    """A group of the simulation: its span, its blocks, of which so many extents have memory, and how many at least."""

    span: KeySpan
    blocks: int
    extent_blocks: int
    mapped: int
    least: int
    block_bytes: int = 16


class WindowStamps:
    """A PagedMemory whose slots tell who wrote them."""

    def __init__(self, size: WindowSize, block_tokens: int) -> None:
        self.size = size
        self.layout = PagedLayout(
            "windows", size.blocks, block_tokens, size.block_bytes, size.extent_blocks,
            -(-size.least // size.extent_blocks), size.span,
        )  # fmt: skip
        self.there = set(range(size.mapped))
        self.slots: list[list[Slot]] = [[None] * block_tokens for _ in range(size.blocks)]
        self.kept: list[list[Slot]] = []
        self.kept_blocks: list[int] = []
        self.asleep = False
        self.reads = 0
        self.segments = 0  # of which several members saw a part

    def new_pool(self) -> BlockPool:
        return BlockPool(self.size.blocks, self.size.extent_blocks, self.mapped, self.size.least)

    @property
    def mapped(self) -> list[int]:
        return sorted(self.there)

    def zero(self, blocks: Items[int]) -> None:
        for block in blocks:
            if self.asleep:
                self.kept[self.kept_blocks.index(block)] = self._blank()
            else:
                self._block(block)[:] = self._blank()

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._block(target)[:] = self._block(source)

    def map(self, extents: Items[int]) -> None:
        assert self.there.isdisjoint(extents)
        self.there |= {*extents}

    def unmap(self, extents: Items[int]) -> None:
        assert self.there >= {*extents}
        self.there -= {*extents}
        for extent in extents:
            first = extent * self.layout.extent_blocks
            for block in self.slots[first : first + self.layout.extent_blocks]:
                assert not any(slot is not None and slot[0].terms.erase for slot in block), "a secret is given away"
                block[:] = self._blank()

    def give_back(self, keep: Items[int]) -> None:
        """Loses all memory and what is in it but these blocks; nothing secret is left then."""
        self.kept_blocks = list(keep)
        self.kept = [list(self._block(block)) for block in keep]
        self.unmap(self.mapped)
        self.asleep = True

    def come_back(self, extents: Items[int], restore: Items[int]) -> None:
        self.asleep, self.there = False, {*extents}
        for block, kept in zip(restore, self.kept, strict=True):
            self._block(block)[:] = kept
        self.kept, self.kept_blocks = [], []

    def launch(self, index: int, plan: StepPlan, block_tokens: int) -> None:
        """Writes what the step writes, then checks what each of its rows sees."""
        writers: dict[int, Sequence] = {}
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            table = sequence.window_tables[index]
            for position in range(sequence.launched - chunk, sequence.launched):
                block = blocks_of(table.pages[position // block_tokens - table.first :][:1].tolist())[0]
                assert writers.setdefault(block, sequence) is sequence, "two slices write one block"
                slots = self._block(block)
                for slot in slots:
                    secret = slot is not None and slot[0].terms.erase
                    assert not secret or slot is None or _shares(slot[0], sequence), "given on before it was erased"
                slots[position % block_tokens] = (sequence, position)
        batch = unpack_step(plan.packed)
        group = len(batch.tables_GSW) - len(plan.sequences[0].window_tables) + index
        self.segments += sum(self._read_together(batch, group))
        for number, (sequence, chunk) in enumerate(zip(plan.sequences, plan.chunks, strict=True)):
            first = self.size.span.first(sequence.launched - chunk)
            table = read_table(batch, group, number, first, block_tokens)
            for position in range(first, sequence.launched):
                block = int(table[position // block_tokens - first // block_tokens])
                assert writers.get(block, sequence) is sequence, "it reads a block that another slice writes"
                slot = self._block(block)[position % block_tokens]
                assert slot is not None, "it reads what nobody wrote"
                writer, written = slot
                assert written == position
                if writer is not sequence:
                    public = position < sequence.public_blocks * block_tokens
                    assert public or writer.namespace == sequence.namespace is not None, "another scope wrote it"
                    assert writer.tokens[: position + 1] == sequence.tokens[: position + 1], "another prefix"
                self.reads += 1

    def _read_together(self, batch: StepBatch, group: int) -> Iterator[bool]:
        """For each segment of the group whether several of its members see a part of it."""
        for _, _, last, members_M in batch.segments(group):
            yield sum(self.size.span.firsts(batch.contexts_S[members_M] - 1) < last) > 1

    def _block(self, block: int) -> list[Slot]:
        assert not self.asleep
        assert block // self.layout.extent_blocks in self.there, "a block without memory"
        return self.slots[block]

    def _blank(self) -> list[Slot]:
        return [None] * self.layout.block_tokens


def _shares(writer: Sequence, sequence: Sequence) -> bool:
    return writer is sequence or (writer.namespace is not None and writer.namespace == sequence.namespace)
