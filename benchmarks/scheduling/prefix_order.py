"""What an account gains where its longest cached prefix goes first: prompts behind several prefixes, in a cache with
room for few of them.

    python -m benchmarks.scheduling.prefix_order [--requests 2000]

The scheduler, its tree and its pool are real; steps take a time by their rows, as the built-in model's do on a CPU.
Everything follows from the seed. `arrival order` is the same run with nothing known of what is cached.
"""

import argparse
import random
from array import array
from collections.abc import Callable
from typing import Final

import numpy as np

from benchmarks.record import record
from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.protocol.frames import Submit
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator
from engine.step.executor import RunnerOutput
from prefixcache.tree import PrefixTree

BLOCK_TOKENS: Final = 16
PREFIXES: Final = 12
PREFIX_TOKENS: Final = 512
OWN_TOKENS: Final = (16, 64)
OUTPUT_TOKENS: Final = (8, 32)
SEQUENCES: Final = 8
CACHED_PREFIXES: Final = 4  # that the pool has room for beside what runs
BLOCKS: Final = (CACHED_PREFIXES * PREFIX_TOKENS + SEQUENCES * (OWN_TOKENS[1] + OUTPUT_TOKENS[1])) // BLOCK_TOKENS
STEP_TOKENS: Final = 256
STEP_S: Final = 0.003
ROW_S: Final = 0.0001
PER_S: Final = 18.0  # requests; some wait, and in neither order does the queue grow
VOCABULARY: Final = 50_000


class Run:
    """One account's requests at random times, on a clock of its own."""

    def __init__(self, requests: int, seed: int, cached_tokens: Callable[[Sequence], int] | None = None) -> None:
        """cached_tokens: what the scheduler is told of a waiting sequence instead of what is cached."""
        self._now_s = 0.0
        kv = KVManager(PrefixTree(BLOCKS, BLOCK_TOKENS, self._clock), BlockPool(BLOCKS))
        if cached_tokens is not None:
            kv.cached_tokens = cached_tokens  # type: ignore[method-assign]
        self.scheduler = Scheduler(
            kv, SchedulerConfig(STEP_TOKENS, STEP_TOKENS, SEQUENCES, requests), clock=self._clock
        )
        self._validator = RequestValidator("r", "kv", BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS, VOCABULARY, frozenset())
        pick = random.Random(seed)
        prefixes = [_words(pick, PREFIX_TOKENS) for _ in range(PREFIXES)]
        self._arrivals: list[tuple[float, Submit]] = []
        at_s = 0.0
        for id in range(requests):
            at_s += pick.expovariate(PER_S)
            tokens = pick.choice(prefixes) + _words(pick, pick.randint(*OWN_TOKENS))
            scope = Scope(ScopeKind.TENANT, b"a" * 16)
            submit = Submit(id, tokens.tobytes(), scope, SamplingParams(), pick.randint(*OUTPUT_TOKENS))
            self._arrivals.append((at_s, submit))
        self._arrived_s = {submit.id: at_s for at_s, submit in self._arrivals}
        self.first_token_s: dict[int, float] = {}
        self.prompt_tokens = sum(len(submit.tokens) // 4 for _, submit in self._arrivals)

    def _clock(self) -> float:
        return self._now_s

    def go(self) -> "Run":
        arrivals = iter(self._arrivals)
        following = next(arrivals, None)
        while following is not None or not self.scheduler.intake.idle:
            while following is not None and following[0] <= self._now_s:
                self.scheduler.intake.add(self._validator.sequences(following[1], owner=1, now_s=self._now_s))
                following = next(arrivals, None)
            if not self._step() and following is not None:
                self._now_s = following[0]
        return self

    def _step(self) -> bool:
        plan = self.scheduler.next_batch()
        if plan is None:
            return False
        self._now_s += STEP_S + ROW_S * sum(plan.chunks)
        self.scheduler.commit(plan, RunnerOutput(np.zeros(plan.sampled_rows, np.int32), {}))
        for outputs in self.scheduler.intake.take_outputs().values():
            for id in outputs.ids:
                self.first_token_s.setdefault(id, self._now_s - self._arrived_s[id])
        return True

    def cached_share(self) -> float:
        return self.scheduler.intake.counters["cached_tokens"] / self.prompt_tokens

    def first_token_ms(self, percent: int) -> float:
        waits = sorted(self.first_token_s.values())
        return 1e3 * waits[len(waits) * percent // 100]


def _words(pick: random.Random, count: int) -> "array[int]":
    return array("I", (pick.randrange(VOCABULARY) for _ in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    shape = f"{PREFIXES} prefixes of {PREFIX_TOKENS} tokens, cache for {CACHED_PREFIXES}"
    for peer, run in (
        ("arrival order", Run(arguments.requests, arguments.seed, lambda _: 0).go()),
        (None, Run(arguments.requests, arguments.seed).go()),
    ):
        record("prefix_order", f"{shape}: prompt tokens found cached", 100 * run.cached_share(), "%", peer=peer)
        for percent in (50, 95, 99):
            record("prefix_order", f"{shape}: first token p{percent}", run.first_token_ms(percent), "ms", peer=peer)


if __name__ == "__main__":
    main()
