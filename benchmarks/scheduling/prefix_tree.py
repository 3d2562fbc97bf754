"""What the prefix tree costs with 100,000 blocks in it: matching and inserting 32,768 tokens, and its memory per block.

Three trees: `long`, whose prompts of 2,048 blocks are one edge each; `branching`, short conversations whose turns of 2
to 8 blocks are an edge each, behind a few system prompts; `leaves`, conversations of one block each behind one system
prompt. In all the prompt that is matched is one edge, and then 256 of them, as a conversation of 256 turns leaves it.
Besides, `chain`: prompts that were asked for at every length, so that each block is an edge, which costs the most
memory; and `scopes`: 10,000 tenants with one system prompt. CPU time of this process, medians.
"""

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable

from benchmarks.record import record
from prefixcache.lease import Lease
from prefixcache.namespace import Namespace, RetentionPolicy
from prefixcache.tree import PrefixTree

BLOCK_TOKENS = 16
POOL = 100_000
LONG_TOKENS = 32_768
SCOPES = 10_000
MATCH_MS, INSERT_MS, BYTES_PER_BLOCK = 0.5, 1.0, 400.0


def namespace(number: int) -> Namespace:
    return Namespace("r", "", "r", "kv", BLOCK_TOKENS, 2, number.to_bytes(16, "big"), 0)


class Pool:
    """A tree and the next free block id: what a replica adds to it, without the replica."""

    def __init__(self, blocks: int) -> None:
        self.tree = PrefixTree(blocks, BLOCK_TOKENS, time.monotonic)
        self._next = 0

    def add(self, space: Namespace, tokens: "array[int]") -> Lease:
        lease = self.match(space, tokens)
        rest = tokens[lease.tokens :]
        count = len(rest) // BLOCK_TOKENS
        blocks = list(range(self._next, self._next + count))
        self._next += count
        lease, spare = self.tree.insert(lease, rest, blocks)
        assert not spare
        return lease

    def match(self, space: Namespace, tokens: "array[int]") -> Lease:
        return self.tree.match(space, tokens, RetentionPolicy(space.scope_id))

    def append(self, lease: Lease, tokens: "array[int]") -> None:
        self.tree.insert(lease, tokens, [self._next])
        self._next += 1


def prompt(pick: random.Random, tokens: int) -> "array[int]":
    return array("I", (pick.randrange(128_000) for _ in range(tokens)))


def long_edges(pick: random.Random) -> Pool:
    pool = Pool(2 * POOL)
    while pool.tree.cached_blocks < POOL:
        pool.tree.release(pool.add(namespace(pool.tree.cached_blocks % 100), prompt(pick, LONG_TOKENS)))
    return pool


def branching(pick: random.Random) -> Pool:
    pool = Pool(2 * POOL)
    systems = [prompt(pick, 1024) for _ in range(20)]
    while pool.tree.cached_blocks < POOL:
        number = pick.randrange(len(systems))
        turns = systems[number]
        for _ in range(3):
            turns = turns + prompt(pick, BLOCK_TOKENS * pick.randrange(2, 9))
            pool.tree.release(pool.add(namespace(number), turns))
    return pool


def leaves(pick: random.Random) -> Pool:
    pool = Pool(2 * POOL)
    system = prompt(pick, 1024)
    while pool.tree.cached_blocks < POOL:
        pool.tree.release(pool.add(namespace(0), system + prompt(pick, BLOCK_TOKENS)))
    return pool


def chain(pick: random.Random) -> Pool:
    pool = Pool(2 * POOL)
    while pool.tree.cached_blocks < POOL:
        prompt_ids = prompt(pick, BLOCK_TOKENS * 500)
        for end in range(len(prompt_ids), 0, -BLOCK_TOKENS):
            pool.tree.release(pool.add(namespace(0), prompt_ids[:end]))
    return pool


def scopes(pick: random.Random) -> Pool:
    pool = Pool(2 * POOL)
    system = prompt(pick, POOL * BLOCK_TOKENS // SCOPES)
    for number in range(SCOPES):
        pool.tree.release(pool.add(namespace(number), system))
    return pool


def median_ms(act: Callable[[], object], rounds: int) -> float:
    """CPU milliseconds; without the collector, which a replica freezes too."""
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        act()
        times.append((time.thread_time() - began) * 1e3)
    return statistics.median(times)


def built(shape: str, build: Callable[[random.Random], Pool], pick: random.Random) -> Pool:
    """The tree, and a row of how much memory it takes."""
    gc.collect()
    tracemalloc.start()
    pool = build(pick)
    gc.collect()
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    record(
        "prefix_tree",
        f"{shape}: memory per cached block",
        held_bytes / pool.tree.cached_blocks,
        "bytes",
        bound=BYTES_PER_BLOCK,
    )
    return pool


def measure(shape: str, build: Callable[[random.Random], Pool], rounds: int) -> None:
    pick = random.Random(1)
    pool = built(shape, build, pick)
    space, prompt_ids = namespace(1), prompt(pick, LONG_TOKENS)
    pool.tree.release(pool.add(space, prompt_ids))
    gc.disable()
    leases: list[Lease] = []
    matched = median_ms(lambda: leases.append(pool.match(space, prompt_ids)), rounds)
    assert all(lease.tokens == LONG_TOKENS for lease in leases)
    record("prefix_tree", f"{shape}: match of 32,768 cached tokens", matched, "ms", bound=MATCH_MS)
    for turn in range(1, 256):
        pool.tree.release(pool.match(space, prompt_ids[: turn * LONG_TOKENS // 256]))
    matched = median_ms(lambda: leases.append(pool.match(space, prompt_ids)), rounds)
    record("prefix_tree", f"{shape}: match of 32,768 cached tokens in 256 turns", matched, "ms", bound=MATCH_MS)
    fresh = iter([prompt(pick, LONG_TOKENS) for _ in range(rounds)])

    def insert() -> None:
        leases.append(pool.add(space, next(fresh)))

    rounds_that_fit = min(rounds, (2 * POOL - pool.tree.cached_blocks) // (LONG_TOKENS // BLOCK_TOKENS) - 1)
    inserted = median_ms(insert, rounds_that_fit)
    record("prefix_tree", f"{shape}: match and insert of 32,768 new tokens", inserted, "ms", bound=INSERT_MS)
    grown = iter([prompt(pick, BLOCK_TOKENS) for _ in range(256)])
    appended = median_ms(lambda: pool.append(leases[-1], next(grown)), 256)
    record("prefix_tree", f"{shape}: insert of one generated block", appended, "ms")
    for lease in leases:
        pool.tree.release(lease)
    evicted = median_ms(lambda: pool.tree.evict(2048), 20)
    record("prefix_tree", f"{shape}: eviction of 2,048 blocks", evicted, "ms")
    gc.enable()
    pool.tree.check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="repetitions of each measurement (default: 40)")
    rounds = parser.parse_args().rounds
    copied = prompt(random.Random(2), LONG_TOKENS)
    bound = median_ms(lambda: bytes(copied.tobytes()) == copied.tobytes(), 200)
    record("prefix_tree", "bound: copying and comparing the bytes of 32,768 tokens", bound, "ms")
    measure("long", long_edges, rounds)
    measure("branching", branching, rounds)
    measure("leaves", leaves, rounds)
    built("chain", chain, random.Random(1)).tree.check()
    many = built("scopes", scopes, random.Random(1)).tree
    for count in (1, 512):
        evicted = median_ms(lambda count=count: many.evict(count), rounds)  # type: ignore[misc]
        record("prefix_tree", f"scopes: eviction of {count} blocks from 10,000 scopes", evicted, "ms")
    many.check()


if __name__ == "__main__":
    main()
