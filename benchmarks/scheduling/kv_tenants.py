"""Chats of many tenants, each behind a system prompt of its own, with host memory for what is evicted and without.

Each tenant calls once; then they call as Zipf has it (1.0), at random times, and half of a tenant's calls go on with
one of its chats. Figures are from the last half of these: the share of prompts' tokens that some tier had, and the
median time to the first token with host memory ÷ without.

    simulated   1,000 tenants × 2,048 tokens of an 8B, 20 calls/s: the real scheduler, tree and tier; steps take what an
                H200 was measured to take, and copies what PCIe does at 50 GB/s. Nothing runs on a GPU.
    cpu         24 tenants × 512 tokens, one call behind the other: the built-in model itself, on this machine

    python -m benchmarks.scheduling.kv_tenants [--part simulated] [--calls 3000] [--pool-gb 110] [--host-gb 320]
        [--disk-gb 0] [--tenants 1000]
"""

import argparse
import math
import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Final

import numpy as np

from benchmarks.record import record
from engine.execution.open import inference_mode, open_model
from engine.kv_blocks.block_pool import BlockPool
from engine.kv_blocks.kv_manager import KVManager
from engine.protocol.frames import Submit
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.replica.open_scheduler import open_scheduler, open_validator
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_loop import StepLoop
from engine.scheduling.token_budget import SchedulerConfig
from engine.sequences.sequence import Sequence
from engine.sequences.validation import RequestValidator
from engine.step.cost_model import CostModel
from engine.step.executor import CopyOutcome, FileCopy, PagedLayout, RunnerOutput
from engine.step.layout import Int32s
from engine.step.limits import ExecutorLimits
from engine.tiers.host_blocks import HostBlocks, open_tree

BLOCK_TOKENS: Final = 16
BLOCK_BYTES: Final = 131_072 * BLOCK_TOKENS  # of Llama-3.1-8B in bf16
COPY_BYTES_S: Final = 50e9
DISK_READ_BYTES_S: Final = 6e9  # what a disk on four lanes of PCIe 4 reads, and
DISK_WRITE_BYTES_S: Final = 3e9  # writes
# Llama-3.1-8B on one H200: 4.2 ms a row, 24 ms for 1,024 tokens, 214 ms for 8,192 (results/h200_engine.json)
COSTS: Final = CostModel(
    ((1, 4200.0), (64, 4600.0), (256, 6500.0), (1024, 21_000.0), (8192, 154_000.0)),
    key_us=0.0356, shared_key_us=0.1, pair_us=0.0011, prompt_pair_us=0.0018, segment_us=1.0, groups_us=550.0,
)  # fmt: skip
VOCABULARY: Final = 50_000


@dataclass(slots=True)
class Call:
    """One call: when it comes, whose it is, its prompt, and how many tokens it wants."""

    at_s: float
    tenant: int
    prompt: "array[int]"
    output: int
    first_s: float = 0.0
    cached: int = 0


@dataclass(slots=True)
class Chats:
    """Calls as they come. A chat's next prompt is its last one, an answer, and what its user says then; the answer here
    is not the model's, so that with and without host memory the same is asked."""

    tenants: int
    system_tokens: int
    rate: float
    pick: random.Random
    output: int
    open: dict[int, list["array[int]"]] = field(default_factory=dict)

    def calls(self, count: int) -> list[Call]:
        pick, at_s = self.pick, 0.0
        weights = [1 / rank for rank in range(1, self.tenants + 1)]
        systems = [self._tokens(self.system_tokens) for _ in range(self.tenants)]
        calls = []
        first = pick.sample(range(self.tenants), self.tenants)
        for tenant in [*first, *pick.choices(range(self.tenants), weights, k=count)]:
            at_s += pick.expovariate(self.rate)
            chats = self.open.setdefault(tenant, [])
            history = chats.pop(pick.randrange(len(chats))) if chats and pick.random() < 0.5 else systems[tenant]
            prompt = history + self._tokens(pick.randint(20, 120))
            if len(prompt) < self.system_tokens + 1000:
                chats.append(prompt + self._tokens(self.output))
            calls.append(Call(at_s, tenant, prompt, self.output))
        return calls

    def _tokens(self, count: int) -> "array[int]":
        return array("I", (self.pick.randrange(4000) for _ in range(count)))


class SimulatedDevice:
    """An executor and a tier without a device: a step and a copy end when they would on an H200."""

    def __init__(self, blocks: int, slots: int, places: int) -> None:
        self.now = 0.0
        self.files = SimulatedFiles(self, places) if places else None
        self.limits = ExecutorLimits(8192, VOCABULARY, (blocks,), 2048, 8192, 512, 2)
        self.costs = COSTS
        self.slots = slots
        self.layout = PagedLayout("kv", blocks, BLOCK_TOKENS, BLOCK_BYTES, blocks, 1)
        self.mapped = [0]
        self.scheduler: Scheduler | None = None
        self.steps_s = self._copies_s = 0.0  # when what is queued ends

    def launch(self, packed: Int32s) -> "SimulatedWork":
        assert self.scheduler is not None
        plan = self.scheduler.running.inflight[-1]
        took_us = COSTS.rows_us(sum(plan.chunks))
        for sequence, chunk in zip(plan.sequences, plan.chunks, strict=True):
            took_us += COSTS.reads_us(sequence.launched - chunk, chunk)
        self.steps_s = max(self.steps_s, self.now) + took_us / 1e6
        return SimulatedWork(self, self.steps_s, plan.sampled_rows)

    def warm_up(self) -> bool:
        return False

    def grow(self) -> bool:
        return False

    def copied(self) -> "SimulatedWork":
        return SimulatedWork(self, self._copies_s, 0)

    def store(self, blocks: Items[int], slots: Items[int]) -> None:
        """Copies outward have a direction of their own, and no step waits for them."""

    def load(self, slots: Items[int], blocks: Items[int]) -> "SimulatedWork":
        self._copies_s = max(self._copies_s, self.now) + len(blocks) * BLOCK_BYTES / COPY_BYTES_S
        return SimulatedWork(self, max(self._copies_s, self.steps_s), 0)

    def zero(self, blocks: Items[int]) -> None:
        """It takes no time worth counting."""

    def copy(self, sources: Items[int], targets: Items[int]) -> None:
        raise AssertionError("nothing moves here")

    map = unmap = zero


class SimulatedFiles:
    """BlockFiles without a disk: reads and writes have a rate of their own, one behind the other."""

    def __init__(self, device: SimulatedDevice, places: int) -> None:
        self.error = ""
        self.places = 0
        self._max_places = places
        self._device = device
        self._ends_s = {"read": 0.0, "write": 0.0}
        self._under_way: deque[tuple[float, FileCopy]] = deque()

    def grow(self) -> None:
        self.places = self._max_places

    def write(self, copy: FileCopy) -> None:
        self._begin("write", copy, DISK_WRITE_BYTES_S)

    def read(self, copy: FileCopy) -> None:
        self._begin("read", copy, DISK_READ_BYTES_S)

    def erase(self, places: Items[int]) -> None:
        """It is behind the writes, which nobody waits for."""

    def take_done(self) -> list[FileCopy]:
        done = [copy for end_s, copy in self._under_way if end_s <= self._device.now]
        self._under_way = deque(pair for pair in self._under_way if pair[0] > self._device.now)
        return done

    def fileno(self) -> int:
        return -1

    @property
    def next_s(self) -> float:
        """When the next copy ends."""
        return min((end_s for end_s, _ in self._under_way), default=math.inf)

    def _begin(self, way: str, copy: FileCopy, bytes_s: float) -> None:
        end_s = max(self._ends_s[way], self._device.now) + BLOCK_BYTES / bytes_s
        self._ends_s[way] = end_s
        copy.outcome = CopyOutcome.DONE
        self._under_way.append((end_s, copy))


@dataclass(slots=True)
class SimulatedWork:
    """A step or a copy, and when it ends."""

    device: SimulatedDevice
    end_s: float
    rows: int

    def passed(self) -> bool:
        return self.device.now >= self.end_s

    def wait(self) -> RunnerOutput:
        self.device.now = max(self.device.now, self.end_s)
        return RunnerOutput(np.full(self.rows, 7, np.int32), {})


class Served:
    """A scheduler and its loop, with or without host memory. `run` serves calls and notes their first tokens."""

    def __init__(self, scheduler: Scheduler, loop: StepLoop, door: RequestValidator) -> None:
        self.scheduler = scheduler
        self.loop = loop
        self.door = door
        self.calls: dict[int, Call] = {}

    def submit(self, id: int, call: Call, now_s: float) -> None:
        name = call.tenant.to_bytes(16, "big")
        scope = Scope(ScopeKind.TENANT, name, account=name)
        sampling = SamplingParams(ignore_eos=True)
        submit = Submit(id, call.prompt.tobytes(), scope, sampling, call.output)
        self.scheduler.intake.add(self.door.sequences(submit, 1, now_s))
        self.calls[id] = call

    def listen(self, now_s: float) -> None:
        for outputs in self.scheduler.intake.take_outputs().values():
            for started in outputs.started:
                self.calls[started.id].cached = started.cached_tokens
            for id in outputs.ids:
                self.calls[id].first_s = self.calls[id].first_s or now_s


def simulate(calls: list[Call], blocks: int, slots: int, places: int = 0) -> Served:
    """Serves these calls as they come, in simulated time, with so many blocks in the pool, in host memory, on disk."""
    device = SimulatedDevice(blocks, slots, places)
    host: HostBlocks[Sequence] | None
    tree, host = open_tree(blocks, BLOCK_TOKENS, BLOCK_BYTES, lambda: device.now, device if slots else None)
    config = SchedulerConfig(2048, 8192, 512, 4096, gap_ms=20.0, costs=COSTS)
    scheduler = Scheduler(KVManager(tree, BlockPool(blocks), host=host), config, lambda: device.now)
    device.scheduler = scheduler
    loop = StepLoop(device, scheduler, [device], None, device if slots else None)
    served = Served(scheduler, loop, RequestValidator("r", "kv", BLOCK_TOKENS, 8192, VOCABULARY, frozenset()))
    coming = list(enumerate(calls))[::-1]
    while coming or not loop.idle:
        if loop.idle:
            device.now = max(device.now, coming[-1][1].at_s)
        while coming and coming[-1][1].at_s <= device.now:
            served.submit(*coming.pop(), device.now)
        worked = loop.turn()
        loop.sweep()
        served.listen(device.now)
        if not worked and not loop.idle and device.files is not None:  # all that is there waits for the disk
            device.now = max(device.now, min(device.files.next_s, coming[-1][1].at_s if coming else math.inf))
    return served


def serve_on_cpu(calls: list[Call], host_bytes: int) -> Served:
    """Serves these calls one behind the other by the built-in model, whose pool holds six of the tenants' prompts."""
    folder = str(files("engine") / "builtin_model")
    spec = ModelSpec(
        name="ember", folder=folder, dtype="float32", context_tokens=2048, kv_bytes=6 * 36 << 17,
        host_kv_bytes=host_bytes,
    )  # fmt: skip
    with inference_mode():
        model = open_model(spec, "cpu", None, lambda: None)
        scheduler = open_scheduler(model, spec, time.monotonic)
        assert isinstance(scheduler, Scheduler)
        loop = StepLoop(model.executor, scheduler, model.memories, None, model.tier)
        served = Served(scheduler, loop, open_validator(model, spec, 2048))
        while loop.sweep():
            pass
        for id, call in enumerate(calls):
            call.at_s = time.monotonic()
            served.submit(id, call, call.at_s)
            while not loop.idle:
                loop.turn()
                served.listen(time.monotonic())
                loop.sweep()
        model.close()
    return served


def figures(served: Served, count: int) -> tuple[float, float, float]:
    """Of the last so many calls: the share of prompts' tokens that were cached, and the median and the 95th of
    100 times to the first token, in ms."""
    later = [*served.calls.values()][-count:]
    first_ms = [1e3 * (call.first_s - call.at_s) for call in later]
    shares = sum(call.cached for call in later) / sum(len(call.prompt) for call in later)
    return shares, statistics.median(first_ms), statistics.quantiles(first_ms, n=20)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=["simulated", "cpu"], default="simulated")
    parser.add_argument("--calls", type=int, default=None)
    parser.add_argument("--pool-gb", type=float, default=110.0)
    parser.add_argument("--host-gb", type=float, default=320.0)
    parser.add_argument("--disk-gb", type=float, default=0.0, help="simulated; 0: nothing lies below host memory")
    parser.add_argument("--tenants", type=int, default=1000, help="of the simulation")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    simulated = given.part == "simulated"
    count = given.calls or (3000 if simulated else 120)
    results = []
    for has_host in (False, True):
        pick = random.Random(given.seed)
        if simulated:
            sizes = (given.pool_gb, given.host_gb, given.disk_gb)
            blocks, slots, places = (int(size * 1e9 / BLOCK_BYTES) for size in sizes)
            calls = Chats(given.tenants, 2048, 20.0, pick, 100).calls(count)
            served = simulate(calls, blocks, *((slots, places) if has_host else (0, 0)))
        else:
            served = serve_on_cpu(Chats(24, 512, 1.0, pick, 8).calls(count), (256 << 20) if has_host else 0)
        results.append(figures(served, count // 2))
        print(f"{'with' if has_host else 'without'} host memory: {results[-1]}")
        print(
            {
                name: number
                for name, number in served.scheduler.kv.counters().items()
                if "host" in name or "disk" in name
            }
        )
    (plain_share, plain_ms, plain_95), (share, kept_ms, kept_95) = results
    pool = f", KV pool of {given.pool_gb:g} GB" if simulated else ""
    if simulated and given.disk_gb:
        pool += f", host memory of {given.host_gb:g} GB, disk of {given.disk_gb:g} GB, {given.tenants} tenants"
    where = f"simulated H200{pool}" if simulated else "built-in model on a CPU"
    record("kv_tenants", f"kv-tenants-hits, {where}", share, "share", peer=f"without host memory {plain_share:.3f}")
    record("kv_tenants", f"kv-tenants-ttft, {where}", kept_ms / plain_ms, "ratio of medians")
    record("kv_tenants", f"first token, {where}", kept_ms, "ms", peer=f"without host memory {plain_ms:.1f} ms")
    record("kv_tenants", f"first token 95 of 100, {where}", kept_95, "ms", peer=f"without {plain_95:.1f} ms")


if __name__ == "__main__":
    main()
