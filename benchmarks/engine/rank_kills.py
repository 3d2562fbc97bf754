"""Killing and freezing ranks on a CPU, again and again: whether anything hangs, is left, or answers wrongly.

    python -m benchmarks.engine.rank_kills [--kills 200] [--ranks 2] [--stages 1] [--seed 1]

Each life is a process that opens the built-in model in several ranks or stages, computes prompts and decodes, sleeps
and wakes. At some moment one rank gets SIGKILL or SIGSTOP. Then the life must end by RankLost, or have ended before;
its tokens must be those of an undisturbed one as far as they go; and no process may be left. One row is how many went
wrong, another how long it took at most until rank 0 knew of a follower that was frozen between its first step and its
last.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from tqdm import tqdm

from benchmarks.record import record
from engine.execution.open import inference_mode
from engine.protocol.specs import ModelSpec
from engine.protocol.types import SamplingParams
from engine.ranks.fork import Ranks, fork_ranks
from engine.ranks.group import RankLost
from engine.ranks.open import open_ranked_model
from engine.step.layout import SequenceSlice, pack_step

FOLDER: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
STEPS: Final = 24
ENDS_S: Final = 30.0  # by then all must be over, on a busy machine too
BLOCKS: Final = tuple(range(8))
LOST: Final = "lost"


@dataclass
class Tally:
    """What came of the lives so far. `wrong` says what went wrong, and with which life."""

    lives: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # from the signal to the end of the life
    noticed_s: list[float] = field(default_factory=list)  # from a freeze to RankLost, where steps ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tally = kill_again_and_again(options.kills, options.ranks, options.stages, options.seed)
    cut = f"{options.ranks}x{options.stages}-stage" if options.stages > 1 else "rank"
    print(f"{tally.lives} lives, {tally.lost} lost a rank; {tally.longest_s:.1f} s at most until a life had ended")
    for line in tally.wrong:
        print(line, file=sys.stderr)
    record("ranks", f"cpu-{cut}-kills-{options.kills}", len(tally.wrong), "wrong ends", bound=0)
    if tally.noticed_s:
        record("ranks", f"cpu-{cut}-frozen-noticed", round(max(tally.noticed_s), 3), "s", bound=1.0)
    sys.exit(bool(tally.wrong))


def kill_again_and_again(kills: int, ranks: int, stages: int, seed: int) -> Tally:
    """Lives with one signal each, at any moment between their forks and their end."""
    pick, tally = random.Random(seed), Tally()
    began = time.monotonic()
    expected = _Life(ranks, stages).finish()
    whole_s = time.monotonic() - began
    assert len(expected) == STEPS, f"an undisturbed life ended early: {expected[-1:]}"
    for _ in tqdm(range(kills), unit="kill", disable=not sys.stderr.isatty()):
        rank, number = pick.randrange(ranks * stages), pick.choice((signal.SIGKILL, signal.SIGSTOP))
        delay_s = pick.uniform(0, 1.1 * whole_s)
        tally.lives += 1
        for problem in _one(_Life(ranks, stages), rank, number, delay_s, expected, tally):
            tally.wrong.append(
                f"seed {seed}, life {tally.lives}, rank {rank}, {number.name} at {delay_s:.3f} s: {problem}"
            )
    return tally


def _one(
    life: "_Life", rank: int, number: signal.Signals, delay_s: float, expected: list[list[Any]], tally: Tally
) -> list[str]:
    time.sleep(delay_s)
    struck_s = time.monotonic()
    life.strike(rank, number)
    if rank == 0 and number == signal.SIGSTOP:  # a machine's agent sees that its heartbeat stands still
        time.sleep(0.05)
        life.strike(0, signal.SIGKILL)
    problems = []
    tokens = life.finish()
    lost = bool(tokens) and tokens[-1][0] == LOST
    tally.lost += lost
    if len(tokens) > 1 and lost and rank and number == signal.SIGSTOP:
        tally.noticed_s.append(float(tokens[-1][1]) - struck_s)
    tokens = tokens[:-1] if lost else tokens
    if tokens != expected[: len(tokens)]:
        problems.append(f"other tokens: {tokens}")
    if not lost and rank and len(tokens) < len(expected):
        problems.append(f"it ended after {len(tokens)} steps, and not by RankLost: {life.output[-300:]}")
    until = time.monotonic() + ENDS_S
    while any(map(_runs, life.pids)) and time.monotonic() < until:
        time.sleep(0.005)
    if left := [pid for pid in life.pids if _runs(pid)]:
        problems.append(f"processes are left: {left}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    tally.longest_s = max(tally.longest_s, time.monotonic() - struck_s)
    return problems


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class _Life:
    """A process that is rank 0 of its own group, and says through a pipe who its followers are and what it sampled."""

    def __init__(self, ranks: int, stages: int) -> None:
        self._reading, writing = os.pipe()
        self.output = ""
        self.pids: list[int] = []
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._reading)
                _live(ranks, stages, lambda line: os.write(writing, (json.dumps(line) + "\n").encode()))
                status = 0
            except BaseException:
                os.write(writing, traceback.format_exc().encode())
            os._exit(status)
        os.close(writing)
        while "\n" not in self.output:
            self.output += os.read(self._reading, 1 << 16).decode()
        self.pids = [self.pid, *json.loads(self.output.partition("\n")[0])]

    def strike(self, rank: int, number: signal.Signals) -> None:
        try:
            os.kill(self.pids[rank], number)
        except ProcessLookupError:
            return  # it has ended

    def finish(self) -> list[list[Any]]:
        """Waits for its end. What it sampled, step by step, and [LOST, when, why] where it lost a rank."""
        while part := os.read(self._reading, 1 << 16):
            self.output += part.decode()
        os.close(self._reading)
        os.waitpid(self.pid, 0)
        lines = self.output.splitlines()[1:]
        return [json.loads(line) for line in lines if line.startswith("[")]


def _live(ranks: int, stages: int, say: Callable[[object], object]) -> None:
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stderr.fileno())
    spec = ModelSpec(
        name="kills",
        folder=str(FOLDER),
        dtype="float32",
        gpus=ranks,
        stages=stages,
        context_tokens=1024,
        kv_bytes=8 << 20,
    )
    group = fork_ranks(spec, "cpu", 1)
    assert group is not None
    say(list(group.group.pids))
    try:
        with inference_mode():
            _compute(spec, group, say)
    except RankLost as error:
        say([LOST, time.monotonic(), str(error)])


def _compute(spec: ModelSpec, group: Ranks, say: Callable[[object], object]) -> None:
    model = open_ranked_model(spec, group, 1, lambda: None)
    tokens = [5, 6, 7, 8, 9, 10, 11, 12] * 4
    computed = 0
    for step in range(STEPS):
        packed = pack_step(
            [SequenceSlice(tokens[computed:], computed, [list(BLOCKS)], SamplingParams(temperature=0.9, seed=3))], 16
        )
        output = model.executor.launch(packed).wait()
        computed = len(tokens)
        tokens.append(int(output.tokens_R[0]))
        say([tokens[-1]])
        if step % 8 == 7:
            (memory,) = model.memories
            mapped, keep = memory.mapped, [list(BLOCKS)]
            model.sleeper.sleep(keep)
            model.sleeper.wake([mapped], keep)
    model.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
