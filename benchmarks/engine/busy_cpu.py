"""Decoding on a CPU whose cores others want too: how many tokens a second of wall time and of processor time give.

    python -m benchmarks.engine.busy_cpu [--rounds 3] [--tokens 40] [--quota-group /sys/fs/cgroup/cpu/one-core]

A Llama of 135 M parameters decodes alone in a process of its own, as many threads as a replica would take, with the
environment that the agent gives it, and with libgomp's own: threads that spin for 6 ms. Scenes, in turns: quiet; beside
two busy loops; on one core, with the two threads of two; and, where it is named, in a control group whose quota is one
core. A share of processor time is lost to the caches that others fill: what one thread, which waits for nobody, keeps
of its tokens per second of processor time beside the busy loops is what the cores allow.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.engine.cpu_engine import GEOMETRIES, Ours, weights, write_folder
from benchmarks.record import record
from engine.execution.open import inference_mode
from engine.hostinfo.cpu import usable_cores, waiting_environment

_SIZES: Final = GEOMETRIES["135M"]
_COMPETITORS: Final = 2
_LIMIT_S: Final = 15.0  # of one run: with threads that spin, 40 tokens may take a minute
_LIBGOMPS_OWN: Final = {"GOMP_SPINCOUNT": "300000"}
_BY_ITSELF: Final = "libgomp's own waiting"

Rates = tuple[float, float]  # tokens per second of wall time, and of processor time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--quota-group", default="", help="a control group with a quota of one core, which is entered")
    parser.add_argument("--decode", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        print(json.dumps(decode(Path(arguments.decode), arguments.threads, arguments.tokens, arguments.quota_group)))
    else:
        measure(arguments.rounds, arguments.tokens, arguments.quota_group)


def decode(folder: Path, threads: int, tokens: int, group: str) -> Rates:
    """Decodes in this process, which enters the control group as soon as it has the model."""
    inference_mode().__enter__()
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    engine = Ours(folder, threads)
    engine.start(np.random.default_rng(0).integers(0, _SIZES.vocabulary, (1, 128)).tolist(), tokens + 3)
    for _ in range(3):
        engine.step()
    wall_s, cpu_s, done = time.perf_counter(), time.process_time(), 0
    while done < tokens and time.perf_counter() - wall_s < _LIMIT_S:
        engine.step()
        done += 1
    return done / (time.perf_counter() - wall_s), done / (time.process_time() - cpu_s)


def measure(rounds: int, tokens: int, group: str) -> None:
    cores = usable_cores()
    ways = {"": (waiting_environment({}), cores), _BY_ITSELF: (_LIBGOMPS_OWN, cores), "one thread": ({}, 1)}
    scenes = ["quiet", "busy", "one core", *(["quota"] if group else [])]
    rates: dict[tuple[str, str], list[Rates]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        write_folder(Path(name), _SIZES, weights(_SIZES))
        for _ in range(rounds):
            for scene in scenes:
                for way, (environment, threads) in ways.items():
                    rates[scene, way].append(run(name, scene, threads, tokens, environment, group))
    medians = {key: tuple(map(statistics.median, zip(*of, strict=True))) for key, of in rates.items()}
    for (scene, way), (wall, cpu) in medians.items():
        shape = f"busy-cpu, 135M, {cores} threads, {scene}"
        record("first_hour", f"{shape}: tokens per second", wall, "tokens/s", peer=way or None)
        record("first_hour", f"{shape}: tokens per CPU second", cpu, "tokens/s", peer=way or None)
    allowed = medians["busy", "one thread"][1] / medians["quiet", "one thread"][1]
    for way in ("", _BY_ITSELF):
        kept = medians["busy", way][1] / medians["quiet", way][1]
        record(
            "first_hour", "first-busy-cpu: tokens per CPU second, busy ÷ quiet, of what the cores allow",
            kept / allowed, "×", bound=0.8, peer=way or None,
        )  # fmt: skip


def run(folder: str, scene: str, threads: int, tokens: int, environment: dict[str, str], group: str) -> Rates:
    command = [sys.executable, "-m", "benchmarks.engine.busy_cpu", "--decode", folder, "--tokens", str(tokens)]
    command += ["--threads", str(threads), "--quota-group", group if scene == "quota" else ""]
    before = os.sched_getaffinity(0)
    with ExitStack() as closing:
        if scene == "busy":
            for _ in range(_COMPETITORS):
                competitor = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                closing.callback(competitor.wait)
                closing.callback(competitor.kill)
        if scene == "one core":
            os.sched_setaffinity(0, {min(before)})
            closing.callback(os.sched_setaffinity, 0, before)
        printed = subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
    wall, cpu = json.loads(printed.splitlines()[-1])
    return wall, cpu


if __name__ == "__main__":
    main()
