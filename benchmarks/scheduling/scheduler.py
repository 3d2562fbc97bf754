"""What the scheduler costs: choosing, packing and committing a step of 256 decodes, without a runner.

Every sequence is in a scope of its own kind of traffic: 16 scopes, all cached in the tree, lengths staggered so that in
each step one sequence in 16 fills a block, which is inserted, and takes a new one. The same steps behind one prompt
that all have in common, read apart and, with costs, as a group; and while 1,000 other accounts wait with long prompts
that find too few blocks. CPU time of this process. A flight is in the air while the next one is planned, as on a GPU.

And what it takes to choose groups anew, which is done where a sequence came or left.
"""

import gc
import random
import time
from array import array
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.record import record
from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.scheduling.prefix_groups import PrefixGroups
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator
from engine.step.cost_model import CostModel
from engine.step.executor import RunnerOutput
from engine.step.key_span import FULL, KeySpan
from engine.step.layout import Count, Int32s
from engine.step.limits import ExecutorLimits
from prefixcache.tree import PrefixTree

DECODES = 256
STEPS = 320
STEPS_BESIDE = 40
WAITING = 1000
WAITING_TOKENS = 48_000  # more blocks than are free, and any sum of prompts that a step could begin with
BLOCK_TOKENS = 16
BOUND_MS = 1.0
COSTS = CostModel(
    ((1, 4200.0),),
    key_us=0.036,
    shared_key_us=0.1,
    pair_us=0.001,
    prompt_pair_us=0.002,
    segment_us=1.0,
    groups_us=550.0,
)


def decoding(
    prompt_tokens: int, sampling: SamplingParams, steps: int, waiting: int, shared: bool, costs: CostModel | None
) -> tuple[StepLoop, Scheduler]:
    """A scheduler whose 256 sequences have all computed their prompts, which may be in common but for their ends, and
    so many other accounts wait."""
    longest = prompt_tokens + steps + 5 * BLOCK_TOKENS  # some start later than others
    blocks = DECODES * (longest // BLOCK_TOKENS + 2)
    budget = DECODES * longest
    scheduler = Scheduler(
        KVManager(PrefixTree(blocks, BLOCK_TOKENS, time.monotonic), BlockPool(blocks)),
        SchedulerConfig(budget, budget, 2 * DECODES, DECODES + waiting, gap_ms=1e6, costs=costs),
        clock=time.monotonic,
    )
    door = RequestValidator("r", "kv", BLOCK_TOKENS, longest, 50_000, frozenset({49_999}))
    pick = random.Random(1)
    for number in range(DECODES):
        tokens = array("I", (pick.randrange(49_000) for _ in range(prompt_tokens + number % BLOCK_TOKENS)))
        if shared:
            tokens[:prompt_tokens] = array("I", range(prompt_tokens))
        scope = Scope(ScopeKind.TENANT, bytes([0 if shared else number % 16]) * 16)
        submit = Submit(number, tokens.tobytes(), scope, sampling, max_tokens=longest)
        scheduler.intake.add(door.sequences(submit, owner=number % 4, now_s=0.0))
    loop = StepLoop(Numbers(), scheduler)
    while scheduler.load(draining=False).running < DECODES:
        step(loop, scheduler)
    door = RequestValidator("r", "kv", BLOCK_TOKENS, WAITING_TOKENS + 2, 50_000, frozenset({49_999}))
    for number in range(waiting):
        tokens = np.arange(number, number + WAITING_TOKENS, dtype=np.uint32)
        scope = Scope(ScopeKind.TENANT, (1000 + number).to_bytes(16, "big"))
        scheduler.intake.add(
            door.sequences(Submit(number, tokens.tobytes(), scope, SamplingParams(), 1), owner=9, now_s=0.0)
        )
    return loop, scheduler


@dataclass(frozen=True, slots=True)
class Landed:
    sampled: RunnerOutput

    def wait(self) -> RunnerOutput:
        return self.sampled


class Numbers:
    """An executor that samples row r of every step as token r, at once."""

    limits = ExecutorLimits(0, 0, (), 0, 0, 0, depth=2)
    costs = None

    def warm_up(self) -> bool:
        return False

    def launch(self, packed: Int32s) -> Landed:
        return Landed(RunnerOutput(np.arange(packed[Count.ROWS], dtype=np.int32), {}))


def step(loop: StepLoop, scheduler: Scheduler) -> int:
    """One turn of the replica's loop without sockets; the sequences that sampled."""
    loop.turn()
    return sum(len(progress.ids) for progress in scheduler.intake.take_outputs().values())


def measure(
    prompt_tokens: int,
    sampling: SamplingParams,
    steps: int = STEPS,
    waiting: int = 0,
    shared: bool = False,
    costs: CostModel | None = None,
) -> list[float]:
    """Milliseconds of CPU time per step, sorted."""
    loop, scheduler = decoding(prompt_tokens, sampling, steps, waiting, shared, costs)
    for _ in range(Numbers.limits.depth):
        step(loop, scheduler)
    gc.collect()
    spent = []
    for _ in range(steps):
        began = time.process_time_ns()
        rows = step(loop, scheduler)
        spent.append((time.process_time_ns() - began) / 1e6)
        assert rows == DECODES
    load = scheduler.load(draining=False)
    assert load.waiting == waiting
    assert (costs is not None) == (load.counters.get("spared_keys", 0) > 0)
    return sorted(spent)


def choosing(groups: int, members: int, windows: tuple[tuple[int, float], ...] = ()) -> float:
    """Milliseconds of CPU time to choose groups anew: so many in layers of each kind, each behind 4096 tokens; the
    median. `windows` as CostModel has them."""
    spans = (FULL, *(KeySpan(window=tokens) for tokens, _ in windows))
    chooser, sequences = PrefixGroups(replace(COSTS, windows=windows), BLOCK_TOKENS, spans), list[Sequence | None]()
    door = RequestValidator("r", "kv", BLOCK_TOKENS, 10_000, 50_000, frozenset())
    for index in range(groups * members):
        scope = Scope(ScopeKind.TENANT, bytes([index // members]) * 16)
        (sequence,) = door.sequences(Submit(index, bytes(4 * 4096), scope, SamplingParams(), 1), owner=1, now_s=0.0)
        sequence.append_pages(range(index // members * 256, index // members * 256 + 256))
        sequence.shared_blocks = 256
        sequence.append_pages([10**6 + index])
        sequence.launched = 4096 + index % 16
        sequences.append(sequence)
    spent = []
    for _ in range(101):
        chooser.invalidate()
        began = time.process_time_ns()
        segments = chooser.segments(sequences)
        spent.append((time.process_time_ns() - began) / 1e6)
        assert len(segments) == groups * len(spans)
    return sorted(spent)[50]


def main() -> None:
    penalty = SamplingParams(frequency_penalty=0.5)
    for name, prompt_tokens, sampling, shared, costs in (
        ("64-token contexts", 64, SamplingParams(), False, None),
        ("4096-token contexts", 4096, SamplingParams(), False, None),
        ("4096-token contexts, one prompt in common", 4096, SamplingParams(), True, None),
        ("4096-token contexts, one prompt in common, grouped", 4096, SamplingParams(), True, COSTS),
        ("4096-token contexts, penalties", 4096, penalty, False, None),
    ):
        spent = measure(prompt_tokens, sampling, shared=shared, costs=costs)
        shape = f"step of {DECODES} decodes, {name}"
        bound = None if sampling is penalty else BOUND_MS
        record("scheduler", f"{shape}, median", spent[len(spent) // 2], "ms", bound=bound)
        record("scheduler", f"{shape}, 99th percentile", spent[len(spent) * 99 // 100], "ms")
    spent = measure(4096, SamplingParams(), STEPS_BESIDE, WAITING)
    shape = f"step of {DECODES} decodes, 4096-token contexts, {WAITING} other accounts waiting"
    record("scheduler", f"{shape}, median", spent[len(spent) // 2], "ms", bound=BOUND_MS)
    record("scheduler", f"{shape}, most", spent[-1], "ms")
    for groups, members in ((1, 256), (50, 10)):
        shape = f"choosing groups of {groups * members} sequences behind {groups} prefixes of 4096 tokens"
        record("scheduler", shape, choosing(groups, members), "ms", bound=1.5)
        record("scheduler", f"{shape}, windows of 1024", choosing(groups, members, ((1024, 0.8),)), "ms", bound=3.0)


if __name__ == "__main__":
    main()
