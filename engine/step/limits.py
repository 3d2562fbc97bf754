"""What an executor can run, and whether a packed step keeps to it. It knows nobody who runs one."""

from dataclasses import dataclass

from engine.step.layout import EMBEDDING_TOKEN, StepBatch


@dataclass(frozen=True, slots=True)
class ExecutorLimits:
    """What an executor can run.

    context_tokens      positions lie below it.
    vocabulary          tokens lie below it.
    blocks              of each KV group: its tables name blocks below that; none without a KV cache.
    step_tokens         the most rows of a step in which some sequence decodes,
    prompt_step_tokens  and of one in which none does.
    sequences           how many may run at once, and the most rows that a step samples.
    depth               steps that may be in flight at once: 1, or 2 where launching does not wait for the step.
    adapters            adapters 1 … adapters are loaded.
    embedding_rows      rows of the buffer of embeddings that tokens may name.
    """

    context_tokens: int
    vocabulary: int
    blocks: tuple[int, ...]
    step_tokens: int
    prompt_step_tokens: int
    sequences: int
    depth: int
    adapters: int = 0
    embedding_rows: int = 0

    @property
    def groups(self) -> int:
        """Block tables of a slice."""
        return len(self.blocks)


def check_step(batch: StepBatch, limits: ExecutorLimits) -> None:
    """Asserts that a step names nothing that its executor has not: no position, token, embedding, block or adapter, and
    not more rows. Costs some 10 µs."""
    assert batch.positions_T.max() < limits.context_tokens, "a position past the context"
    last = int(batch.tokens_T.max())
    if last >= EMBEDDING_TOKEN:
        assert last - EMBEDDING_TOKEN < limits.embedding_rows, "an embedding past the buffer"
        last = int(batch.tokens_T[batch.tokens_T < EMBEDDING_TOKEN].max(initial=-1))
    assert last < limits.vocabulary, "a token past the vocabulary"
    assert len(batch.tables_GSW) == limits.groups, "tables for another number of groups"
    for table_SW, blocks in zip(batch.tables_GSW, limits.blocks, strict=True):
        assert 0 <= table_SW.min() <= table_SW.max() < blocks, "a block past its group's pool"
    assert 0 <= batch.adapters_S.min() <= batch.adapters_S.max() <= limits.adapters, "an adapter that is not loaded"
    assert len(batch.rows_R) <= limits.sequences, "more rows to sample than there may be"
