"""How many sequences of 32,768 tokens a model's KV memory holds where its layers keep unlike amounts, beside pages that
name all layers; and what one long sequence holds of Llama 4 Scout's geometry.

    python -m benchmarks.scheduling.kv_groups

The scheduler that serves runs over geometries of bench in 64 GiB that are counted and not there: sequences are let in,
computed and go on writing, and the most that decode at once are counted. The groups begin with memory in proportion to
what one sequence needs of each, and trade. The bound is arithmetic: what a sequence sees at most, without parts of
blocks and extents.

Scout has 48 layers, of which every fourth sees everything and the others chunks of 8,192. Behind its first chunk a
sequence is to hold the keys of the full layers, 48 KiB a token, a chunk of the others, and a block of all at most.
"""

import random
import tempfile
import time
from array import array
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.record import record
from benchmarks.scheduling.scheduler import Numbers
from engine.bench.geometries import write_folder
from engine.execution.kv_groups import all_memories
from engine.execution.memory_plan import initial_extents, kv_blocks, paged_layout
from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.kv_blocks.windowed_group import WindowedGroup
from engine.kvcache.layer_pools import group_shapes
from engine.kvcache.tensors import KVPool
from engine.models.config import ModelConfig, read_decoder_config
from engine.models.llama import kv_shape
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.validation import RequestValidator
from engine.step.executor import PagedLayout
from engine.step.key_span import FULL, KeySpan
from prefixcache.tree import PrefixTree

KV_BYTES: Final = 64 << 30
CONTEXT_TOKENS: Final = 32_768
WRITTEN_TOKENS: Final = 2_048  # of these: nobody ends before all that fit have begun
STEP_TOKENS: Final = 8_192
SEQUENCES: Final = 512
MODELS: Final = {"layers-window-32k": ("mistral-7b", 7.0), "layers-gemma3-27b-32k": ("gemma-3-27b", 4.5)}


class CountedMemory:
    """A PagedMemory of which only the extents are counted."""

    def __init__(self, layout: PagedLayout, extents: int) -> None:
        self.layout = layout
        self._mapped = set(range(extents))

    @property
    def mapped(self) -> list[int]:
        return sorted(self._mapped)

    def zero(self, blocks: Items[int]) -> None:
        """There is nothing to zero."""

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        """There is nothing to copy."""

    def map(self, extents: Items[int]) -> None:
        self._mapped |= {*extents}

    def unmap(self, extents: Items[int]) -> None:
        self._mapped -= {*extents}


SCOUT_CHUNK: Final = 8_192
SCOUT_TOKENS: Final = 1 << 20
SCOUT_SPANS: Final = (*(KeySpan(chunk=SCOUT_CHUNK),) * 3, FULL) * 12
SCOUT_KEY_BYTES: Final = 48 << 10  # of a token in all full layers


class Served:
    """A scheduler over memory that is counted, for sequences of so many tokens."""

    def __init__(self, config: ModelConfig, context_tokens: int, sequences: int, kv_bytes: int = KV_BYTES) -> None:
        model = ModelSpec(name="m", folder="", kv_bytes=kv_bytes)
        shapes = group_shapes(kv_shape(config, model.block_tokens, torch.bfloat16), config.kv_groups)
        blocks = kv_blocks(model, shapes, context_tokens, sequences, kv_bytes, kv_bytes)
        pools = [KVPool(shape, count, extents=0) for shape, count in zip(shapes, blocks, strict=True)]
        extents = initial_extents(model, pools, context_tokens, kv_bytes, kv_bytes)
        self.memories = all_memories(
            [
                CountedMemory(paged_layout(model, pool, context_tokens), count)
                for pool, count in zip(pools, extents, strict=True)
            ],
            context_tokens,
            sequences,
        )
        self.scheduler, self.loop = _loop(model.block_tokens, self.memories)
        self._door = RequestValidator("r", "kv", model.block_tokens, context_tokens, 50_000, frozenset({49_999}))
        self._pick = random.Random(1)

    def submit(self, number: int, prompt_tokens: int, max_tokens: int) -> None:
        """Submits a prompt that nobody else has."""
        tokens = array("I", (self._pick.randrange(49_000) for _ in range(prompt_tokens)))
        submit = Submit(number, tokens.tobytes(), Scope(), SamplingParams(), max_tokens=max_tokens)
        self.scheduler.intake.add(self._door.sequences(submit, owner=0, now_s=0.0))

    @property
    def held_bytes(self) -> int:
        """What all sequences hold."""
        pairs = zip(self.scheduler.kv.pools, self.memories, strict=True)
        return sum((pool.mapped_blocks - pool.free_blocks) * memory.layout.block_bytes for pool, memory in pairs)


def most_sequences(config: ModelConfig) -> int:
    """How many sequences decode at once, at most, with all of their memory."""
    served = Served(config, CONTEXT_TOKENS, SEQUENCES)
    for number in range(SEQUENCES // 2):
        served.submit(number, CONTEXT_TOKENS - WRITTEN_TOKENS, WRITTEN_TOKENS)
    most, preemptions = 0, 0
    while not served.scheduler.intake.counters["preemptions"] > preemptions:
        served.loop.turn()
        decoding = [sequence for sequence in served.scheduler.running.sequences if sequence.emitted]
        most = max(most, len(decoding))
        if any(sequence.emitted > WRITTEN_TOKENS - 3 for sequence in decoding):
            break  # the first would end, and another take its place
    return most


def scout_excess_blocks(config: ModelConfig) -> float:
    """How many blocks of all layers a sequence of about a million tokens that decodes over a chunk's edge holds, at
    most, beyond 48 KiB a token and what its rows in flight see of their chunks."""
    served = Served(config, SCOUT_TOKENS, 1)
    served.submit(1, SCOUT_TOKENS - SCOUT_CHUNK - 200, 400)
    block_bytes = sum(memory.layout.block_bytes for memory in served.memories)
    chunk_token_bytes = served.memories[1].layout.block_bytes // served.memories[1].layout.block_tokens
    excess: list[float] = []
    while served.loop.turn():
        for sequence in served.scheduler.running.sequences:
            if sequence.emitted:
                seen = sequence.launched - SCOUT_SPANS[0].first(sequence.computed)
                needed = sequence.launched * SCOUT_KEY_BYTES + seen * chunk_token_bytes
                excess.append((served.held_bytes - needed) / block_bytes)
    assert len(excess) >= 398
    assert min(excess) > -1, "less than its rows see"
    return max(excess)


def _loop(block_tokens: int, memories: Items[CountedMemory]) -> tuple[Scheduler, StepLoop]:
    pools = [
        BlockPool(memory.layout.blocks, memory.layout.extent_blocks, memory.mapped, memory.layout.min_blocks)
        for memory in memories
    ]
    windowed = [
        WindowedGroup(index, memory.layout.span, block_tokens, pool, time.monotonic)
        for index, (memory, pool) in enumerate(zip(memories[1:], pools[1:], strict=True))
    ]
    kv = KVManager(PrefixTree(pools[0].total, block_tokens, time.monotonic), pools[0], windowed)
    groups = sum(memory.layout.block_bytes > 0 for memory in memories)
    config = SchedulerConfig(STEP_TOKENS, STEP_TOKENS, SEQUENCES, SEQUENCES, gap_ms=1e6, groups=groups)
    scheduler = Scheduler(kv, config, time.monotonic)
    return scheduler, StepLoop(Numbers(), scheduler, memories)


def bound(config: ModelConfig) -> float:
    """How many times as many tokens of a layer a sequence has with pages of all layers."""
    seen = [min(CONTEXT_TOKENS, span.tokens or CONTEXT_TOKENS) for span in config.spans]
    return config.layers * CONTEXT_TOKENS / sum(seen)


def main() -> None:
    for shape, (geometry, asked) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = read_decoder_config(write_folder(geometry, Path(folder) / geometry))
        groups, uniform = most_sequences(config), most_sequences(replace(config, spans=(FULL,) * config.layers))
        print(f"{geometry}: {groups} sequences, {uniform} with pages of all layers; bound {bound(config):.2f}")
        record("kv_groups", shape, groups / uniform, "x", bound=asked)
        record("kv_groups", f"{shape} bound", bound(config), "x")
    with tempfile.TemporaryDirectory() as folder:
        config = read_decoder_config(write_folder("llama-3.1-8b", Path(folder)))  # whose KV heads are Scout's
    scout = replace(config, layers=len(SCOUT_SPANS), spans=SCOUT_SPANS, context_tokens=SCOUT_TOKENS)
    record(
        "kv_groups",
        "layers-scout-1m: blocks beyond 48 KiB a token and its chunk",
        scout_excess_blocks(scout),
        "blocks",
        bound=1.0,
    )


if __name__ == "__main__":
    main()
