"""Where benchmark figures go: rows of JSON that name hardware, commit and command. It measures nothing itself."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `bound` is what arithmetic or the issue allows at best, `peer` who it is compared with."""

    shape: str
    value: float
    unit: str
    bound: float | None
    peer: str | None
    hardware: str
    commit: str
    command: str


def hardware() -> str:
    """The processor and its cores, and the GPU where there is one, as one line."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    line = f"{processor}, {os.cpu_count()} cores"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        line += f", {torch.cuda.get_device_name()}"
    return line


def commit() -> str:
    """The checkout's short commit, with a plus where the work tree differs from it; where there is no checkout,
    HEARTH_COMMIT says it."""
    there = Path(__file__).parent
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=there, capture_output=True, text=True
    )
    return asked.stdout.strip() or os.environ.get("HEARTH_COMMIT") or "unknown"


def record(
    name: str, shape: str, value: float, unit: str, *, bound: float | None = None, peer: str | None = None
) -> Row:
    """Prints one figure and keeps it in `benchmarks/results/<name>.json`, in place of the same shape's older row."""
    module = sys.modules["__main__"].__spec__  # None where a file was run
    program = os.path.relpath(sys.argv[0]) if module is None else f"-m {module.name}"
    command = " ".join(["python", program, *sys.argv[1:]])
    row = Row(shape, value, unit, bound, peer, hardware(), commit(), command)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [other for other in rows if (other["shape"], other["peer"]) != (shape, peer)] + [asdict(row)]
    path.write_text(json.dumps(rows, indent=1) + "\n")
    beside = "" if bound is None else f"   bound {bound:.6g} {unit}"
    against = "" if peer is None else f"   {peer}"
    print(f"{name:12} {shape:50} {value:.6g} {unit}{beside}{against}")
    return row
