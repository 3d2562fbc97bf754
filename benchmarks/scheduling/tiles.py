"""What it takes to build the array and the tiles of a step of 256 decodes, beside another checkout: that before layers
had groups.

    git worktree add ../before b091fa4
    python -m benchmarks.scheduling.tiles ../before

Both are measured in processes of their own, turn by turn. CPU time; contexts of 4,096 tokens, a layout of one H200.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

DECODES: Final = 256
CONTEXT_TOKENS: Final = 4096
BLOCK_TOKENS: Final = 16
STEPS: Final = 200
ROUNDS: Final = 9
BOUND_MS: Final = 0.1
ROOT: Final = Path(__file__).parents[2]


def build_ms() -> float:
    """The median of what a step takes in the checkout that this process imports, with one group of layers that see
    everything. What slices and layouts are called differs."""
    import numpy as np

    from engine.protocol.types import SamplingParams
    from engine.step.attention_plan import AttentionLayout, plan_attention
    from engine.step.layout import SequenceSlice, pack_step, unpack_step

    grouped = "tables" in SequenceSlice.__struct_fields__
    span: Any = None
    if grouped:
        from engine.step.key_span import FULL as span
    layout = AttentionLayout((span,), 8, 16, 264, 132, 1 << 14)
    pick, slices, width = random.Random(1), list[Any](), CONTEXT_TOKENS // BLOCK_TOKENS + 1
    for index in range(DECODES):
        blocks = np.arange(index * width, (index + 1) * width, dtype=np.int32)
        table: Any = (blocks,) if grouped else blocks
        slices.append(SequenceSlice([pick.randrange(9999)], CONTEXT_TOKENS + index % 16 - 1, table, SamplingParams()))
    spent = []
    for _ in range(STEPS):
        began = time.process_time_ns()
        packed = pack_step(slices, BLOCK_TOKENS)
        plan = plan_attention(packed, unpack_step(packed), layout)
        spent.append((time.process_time_ns() - began) / 1e6)
        assert len(plan.words)
    return statistics.median(spent)


def measured_ms(checkout: Path) -> float:
    """`build_ms` of a checkout."""
    command = [sys.executable, "-P", __file__]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main(before: Path) -> None:
    from benchmarks.record import record

    rounds = [(measured_ms(before), measured_ms(ROOT)) for _ in range(ROUNDS)]
    record("kv_groups", "layers-tiles", statistics.median(now - then for then, now in rounds), "ms", bound=BOUND_MS)
    for name, each in zip(("before", "now"), zip(*rounds, strict=True), strict=True):
        record("kv_groups", f"layers-tiles, {name}", statistics.median(each), "ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        print(build_ms())
