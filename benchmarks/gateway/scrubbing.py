"""What a CPU replica pays for overwriting what it frees ([server] scrub_memory), in pairs of processes.

python -m benchmarks.gateway.scrubbing [--pairs 4]
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from benchmarks.record import record

SCRUBBING: Final = {
    "PYTHONMALLOC": "malloc",
    "GLIBC_TUNABLES": "glibc.malloc.perturb=255:glibc.malloc.tcache_count=0",
}
EMBER: Final = Path(__file__).parents[2] / "engine" / "builtin_model"
SEQUENCES: Final = 16
OUTPUT: Final = 64
PROMPT: Final = 512


def measure() -> tuple[float, float]:
    """(tokens per CPU second of sequences side by side, CPU milliseconds to the first token of one prompt)."""
    import numpy as np

    from engine.execution.open import inference_mode, open_model
    from engine.protocol.frames import Submit
    from engine.protocol.specs import ModelSpec
    from engine.protocol.types import SamplingParams, Scope, ScopeKind
    from engine.replica.open_scheduler import open_scheduler, open_validator
    from engine.scheduling.step_loop import StepLoop

    inference_mode().__enter__()
    spec = ModelSpec(name="ember", folder=str(EMBER), kv_bytes=60_000_000)
    model = open_model(spec, "cpu", 1, lambda: None)
    scheduler = open_scheduler(model, spec, time.monotonic)
    loop = StepLoop(model.executor, scheduler, model.memories)
    door = open_validator(dataclasses.replace(model, stop_ids=frozenset()), spec, 2000)
    alone = Scope(ScopeKind.REQUEST, account=bytes(16))

    def run(sequences: int, prompt: int, output: int) -> float:
        tokens = np.full(prompt, 100, "<u4").tobytes()
        for id in range(sequences):
            submit = Submit(
                id=id, tokens=tokens, scope=alone, sampling=SamplingParams(temperature=0.0), max_tokens=output
            )
            scheduler.intake.add(door.sequences(submit, 1, 0.0))
        began = time.process_time()
        while loop.turn():
            scheduler.intake.take_outputs()
        return time.process_time() - began

    run(2, 40, 4)
    rate = SEQUENCES * OUTPUT / min(run(SEQUENCES, 16, OUTPUT) for _ in range(3))
    return rate, 1e3 * min(run(1, PROMPT, 1) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure()))
        return
    rounds: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for _ in range(options.pairs):
        for name, more in (("without", {}), ("with", SCRUBBING)):
            command = [sys.executable, "-m", "benchmarks.gateway.scrubbing", "--once"]
            printed = subprocess.run(command, env={**os.environ, **more}, stdout=subprocess.PIPE, check=True).stdout
            rounds[name].append(json.loads(printed.splitlines()[-1]))
    for name, pairs in rounds.items():
        rates, first_ms = zip(*pairs, strict=True)
        record("scrubbing", f"{name}, {SEQUENCES} sequences", statistics.median(rates), "tokens/CPU s")
        record("scrubbing", f"{name}, first token of {PROMPT}", statistics.median(first_ms), "CPU ms")


if __name__ == "__main__":
    main()
