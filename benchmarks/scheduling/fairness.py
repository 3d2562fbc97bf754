"""What four accounts notice of a fifth that asks for fifty times as much as each of them: the built-in model's replica,
a process of its own, behind its real socket on the CPU.

    python -m benchmarks.scheduling.fairness [--rounds 8] [--seconds 9] [--step-tokens 256 96]

A round first takes the pace of a saturated replica; the four then ask for a fixed part of it together, at random times:
alone, beside the aggressor, and once more beside it with all requests under one account, which is first come, first
served. A machine's own pace changes from round to round: waits and ratios are medians of the rounds', the rest is of
all rounds together. Time is the replica's own: the CPU time that the kernel counts for it while it has work, and the
wall's while it has none, so that what else the machine does is left out.
"""

import argparse
import contextlib
import json
import os
import random
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.record import record
from engine.protocol.frames import FrameReader, Hello, Reject, ReplicaLoad, StepOutputs, Submit, encode_frame
from engine.protocol.specs import ModelSpec, ReplicaSpec
from engine.protocol.types import SamplingParams, Scope, ScopeKind
from engine.sequences.fair_queue import GENERATED_TOKEN, PROMPT_TOKEN

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / "engine" / "builtin_model"
NO_END: Final = {json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"]: -100.0}
AGGRESSOR: Final = 0
OTHERS: Final = (1, 2, 3, 4)
TIMES: Final = 50
PART: Final = 0.4  # of the pace is what the four ask for together
STEP_TOKENS: Final = (256, 96)  # room for the longest prompt beside all that decode, and for less than half of it
SEQUENCES: Final = 24
PROMPT_TOKENS: Final = (32, 160)
OUTPUT_TOKENS: Final = (8, 48)
WARM_S: Final = 1.0  # of each run counts for nothing
START_S: Final = 60.0
POLL_S: Final = 0.001


@dataclass(slots=True)
class Seen:
    """What came back in one run, or in several."""

    seconds: float = 0.0
    first_token_s: list[float] = field(default_factory=list)  # of the four
    asked: Counter[int] = field(default_factory=Counter)  # tokens as service, by account
    served: Counter[int] = field(default_factory=Counter)

    def add(self, other: "Seen") -> None:
        self.seconds += other.seconds
        self.first_token_s += other.first_token_s
        self.asked.update(other.asked)
        self.served.update(other.served)

    def p95_ms(self) -> float:
        waits = sorted(self.first_token_s)
        return 1e3 * waits[len(waits) * 95 // 100]

    def per_s(self) -> float:
        return sum(self.served.values()) / self.seconds

    def jain(self) -> float:
        """The Jain index of service over what accounts were due: what they asked for, up to an equal level."""
        due, left, total = dict[int, float](), dict(self.asked), float(sum(self.served.values()))
        while left:
            level = (total - sum(due.values())) / len(left)
            content = [account for account in left if left[account] <= level]
            if not content:
                due |= dict.fromkeys(left, level)
                break
            due |= {account: left.pop(account) for account in content}
        parts = [self.served[account] / due[account] for account in due]
        return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


@dataclass(slots=True)
class Asked:
    """A request on its way."""

    account: int
    prompt_tokens: int
    at_s: float
    begun: bool = False


class Run:
    """One connection that submits at random times, at these rates, and counts what comes back."""

    def __init__(self, replica: "Replica", rates: dict[int, float], seed: int, fifo: bool) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(replica.address.removeprefix("unix:"))
        self._replica = replica
        self._now_s = 0.0
        self._wall_s, self._cpu_s = time.perf_counter(), replica.cpu_s()
        self._reader = FrameReader()
        self._pick = random.Random(seed)
        self._words = random.Random()  # no run finds in the cache what another one computed
        self._fifo = fifo
        self._rates = rates
        self._open: dict[int, Asked] = {}
        self._next = 1
        self.seen = Seen()
        self.vocabulary = 0
        self.load: ReplicaLoad | None = None

    def go(self, seconds: float) -> Seen:
        while not self.vocabulary:
            self._receive(counting=False)
        due = {account: self._pick.expovariate(rate) for account, rate in self._rates.items()}
        while (now := self._now()) < WARM_S + seconds:
            for account in due:
                while due[account] <= now:
                    self._submit(account, due[account], counting=now >= WARM_S)
                    due[account] += self._pick.expovariate(self._rates[account])
            self._receive(counting=now >= WARM_S)
        self.seen.seconds = seconds
        return self.seen

    def _now(self) -> float:
        """Seconds since the start, of the replica's own time."""
        wall_s, cpu_s = time.perf_counter(), self._replica.cpu_s()
        self._now_s += cpu_s - self._cpu_s if self._open else wall_s - self._wall_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return self._now_s

    def close(self) -> None:
        self._socket.close()

    def wait_until_idle(self) -> None:
        while self.load is None or self.load.running or self.load.waiting:
            self._receive(counting=False)

    def _submit(self, account: int, at_s: float, counting: bool) -> None:
        pick = self._pick
        prompt = array("I", (self._words.randrange(self.vocabulary) for _ in range(pick.randint(*PROMPT_TOKENS))))
        output = pick.randint(*OUTPUT_TOKENS)
        names = bytes([account]) * 16, bytes([AGGRESSOR if self._fifo else account]) * 16
        scope = Scope(ScopeKind.TENANT, names[0], account=names[1])
        submit = Submit(self._next, prompt.tobytes(), scope, SamplingParams(logit_bias=NO_END), output)
        self._open[self._next] = Asked(account, len(prompt), at_s)
        self._next += 1
        if counting:
            self.seen.asked[account] += PROMPT_TOKEN * len(prompt) + GENERATED_TOKEN * output
        self._socket.sendall(encode_frame(submit))

    def _receive(self, counting: bool) -> None:
        """What has come, or comes within a moment."""
        if not select.select([self._socket], [], [], POLL_S)[0]:
            return
        now = self._now()
        for frame in self._reader.feed(self._socket.recv(1 << 18)):
            if isinstance(frame, StepOutputs):
                self._progress(frame, now, counting)
            elif isinstance(frame, Reject):
                del self._open[frame.id]
            elif isinstance(frame, ReplicaLoad):
                self.load = frame
            elif isinstance(frame, Hello):
                self.vocabulary = frame.vocabulary

    def _progress(self, frame: StepOutputs, now: float, counting: bool) -> None:
        seen = self.seen
        for id, count in zip(frame.ids, frame.counts, strict=True):
            request = self._open[id]
            if not request.begun and counting:
                seen.served[request.account] += PROMPT_TOKEN * request.prompt_tokens
                if request.account != AGGRESSOR:
                    seen.first_token_s.append(now - request.at_s)
            request.begun = True
            seen.served[request.account] += GENERATED_TOKEN * count * counting
        for finish in frame.finished:
            del self._open[finish.id]


@dataclass(frozen=True, slots=True)
class Replica:
    """The built-in model's replica process."""

    address: str
    pid: int

    def cpu_s(self) -> float:
        """What the kernel counts for all its threads."""
        return time.clock_gettime((~self.pid << 3) | 2)  # as clock_getcpuclockid(3) makes it on Linux


@contextlib.contextmanager
def replica(folder: Path, step_tokens: int) -> Iterator[Replica]:
    address = f"unix:{folder / 'replica'}"
    model = ModelSpec(
        name="ember", folder=str(FOLDER), kv_bytes=256 << 20, step_tokens=step_tokens, sequences=SEQUENCES
    )
    spec = ReplicaSpec(model=model, address=address, pulse=str(folder / "pulse"), boot=1, device="cpu", threads=1)
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "engine.replica.server", msgspec.json.encode(spec).decode()]
        child = subprocess.Popen(command, cwd=ROOT, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + START_S
        while not (folder / "replica").exists():
            assert child.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < until, "the replica does not start"
            time.sleep(0.05)
        yield Replica(address, child.pid)
    finally:
        child.terminate()
        child.wait()


def run(replica: Replica, rates: dict[int, float], seconds: float, seed: int, fifo: bool = False) -> Seen:
    """One run from an idle replica to an idle replica."""
    one = Run(replica, rates, seed, fifo)
    seen = one.go(seconds)
    one.close()
    rest = Run(replica, {}, 0, fifo)
    rest.wait_until_idle()
    rest.close()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=9.0)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=STEP_TOKENS)
    arguments = parser.parse_args()
    for step_tokens in arguments.step_tokens:
        measure(step_tokens, arguments.rounds, arguments.seconds)


def measure(step_tokens: int, rounds: int, seconds: float) -> None:
    mean = PROMPT_TOKEN * statistics.mean(PROMPT_TOKENS) + GENERATED_TOKEN * statistics.mean(OUTPUT_TOKENS)
    paces: list[float] = []
    rounds_seen: list[tuple[Seen, Seen, Seen]] = []  # alone, beside the aggressor, and there first come, first served
    with tempfile.TemporaryDirectory() as name, replica(Path(name), step_tokens) as one:
        for seed in range(rounds):
            paces.append(run(one, {AGGRESSOR: 40.0}, seconds / 2, seed).per_s())
            calm = dict.fromkeys(OTHERS, PART * paces[-1] / mean / len(OTHERS))
            attack = {**calm, AGGRESSOR: TIMES * calm[OTHERS[0]]}
            alone = run(one, calm, seconds, seed)
            attacked = run(one, attack, seconds, seed)
            rounds_seen.append((alone, attacked, run(one, attack, seconds, seed, fifo=True)))
    ratios = sorted(attacked.p95_ms() / alone.p95_ms() for alone, attacked, _ in rounds_seen)
    print(f"rounds of {step_tokens} rows a step: {', '.join(f'{ratio:.2f}' for ratio in ratios)}", flush=True)
    record("fairness", f"fairness-{step_tokens}", statistics.median(ratios), "×", bound=2.0)
    if step_tokens == STEP_TOKENS[0]:
        tell(statistics.median(paces), rounds_seen)


def tell(pace: float, rounds_seen: list[tuple[Seen, Seen, Seen]]) -> None:
    four, peer = f"four accounts at {PART:.0%} of the pace", "first come, first served"
    beside = f"{four}, beside a fifth at {TIMES}×"
    alone_ms, attacked_ms, fifo_ms = (
        statistics.median(seen.p95_ms() for seen in kind) for kind in zip(*rounds_seen, strict=True)
    )
    attacked, fifo = Seen(), Seen()
    for _, one, other in rounds_seen:
        attacked.add(one)
        fifo.add(other)
    record("fairness", "pace of a saturated replica, tokens as service", pace, "tokens/s")
    record("fairness", f"{four}, first token p95", alone_ms, "ms")
    record("fairness", f"{beside}, first token p95", attacked_ms, "ms", bound=2 * alone_ms)
    record("fairness", f"{beside}, first token p95", fifo_ms, "ms", peer=peer)
    record("fairness", f"{beside}, Jain index of service over what is due", attacked.jain(), "", bound=0.95)
    record("fairness", f"{beside}, Jain index of service over what is due", fifo.jain(), "", peer=peer)
    rates = statistics.median(one.per_s() / other.per_s() for _, one, other in rounds_seen)
    record("fairness", f"{beside}, tokens/s ÷ {peer}", rates, "×", bound=0.95)


if __name__ == "__main__":
    main()
