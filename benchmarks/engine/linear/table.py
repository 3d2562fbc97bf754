"""The findings of the tuner: the table that kernels/tuning.py reads, and the figures. It measures nothing."""

import json
import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

from benchmarks.engine.linear.alone import Measured
from benchmarks.engine.linear.shapes import AnyTiling
from benchmarks.record import record
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import BF12_KERNELS
from engine.kernels.tuning_tables import ratio_key, tiling_key


def numbers_of(tiling: AnyTiling | None) -> list[Any] | None:
    """As the table has it."""
    if tiling is None:
        return None
    if isinstance(tiling, LinearTiling):
        return [*astuple(tiling)]
    kernel = next(name for name, type_ in BF12_KERNELS.items() if isinstance(tiling, type_))
    return [kernel, *astuple(tiling)]


class Found:
    """Filled, printed row by row, and kept as it grows if it is to be."""

    def __init__(self, path: Path, keeps: bool) -> None:
        self._path = path
        self._keeps = keeps
        self._table: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        print(
            f"{'shape':26} {'rows':>4} {'µs':>8} {'bound':>8} {'ratio':>6} {'library':>8} {'÷ bf16':>6} {'tiles':>8} "
            f"{'few rows':>8}  tiling"
        )

    def add(self, measured: Measured) -> None:
        """The fastest way alone."""
        work, best, library_us = measured.work, measured.best, measured.library_us
        tiles, few = (
            next((f"{timed.us:8.2f}" for timed in measured.found if isinstance(timed.tiling, kind)), f"{'':8}")
            for kind in (HopperTiling, LinearTiling | Bf12Tiling)
        )
        print(
            f"{work.key:26} {work.rows:4} {best.us:8.2f} {work.bound_us:8.2f} {best.us / work.bound_us:6.2f} "
            f"{library_us:8.2f} {best.us / measured.bf16_us:6.3f} {tiles} {few}  {best.tiling}", flush=True,
        )  # fmt: skip
        if self._keeps:
            record("linear", f"{work.key}, {work.rows} rows", best.us, "µs", bound=work.bound_us)
            record("linear", f"{work.key}, {work.rows} rows", library_us, "µs", bound=work.bound_us, peer="library")
        self.change(measured, best.tiling)

    def change(self, measured: Measured, tiling: AnyTiling | None) -> None:
        """Takes one of the ways that were measured."""
        work = measured.work
        outputs, inputs, gated = work.shape
        self._put(work.key, work.rows, numbers_of(tiling))
        if work.is_coded:
            us = next(timed.us for timed in (*measured.found, *measured.others) if timed.tiling == tiling)
            self._put(ratio_key(outputs, inputs, gated), work.rows, round(us / measured.bf16_us, 3))
            if gated and tiling is None:
                self._put(tiling_key(outputs, inputs, False, True), work.rows, None)
        if self._keeps:
            self._write()

    def whole(self, name: str, rows: int, is_coded: bool, ms: float, bf16_ms: float, bound_ms: float) -> None:
        """What a model's chain takes, and in bf16 by the table as it was."""
        if not self._keeps or not math.isfinite(ms):
            return
        shape = f"{name} chain {'bf12' if is_coded else 'bf16'}, {rows} rows"
        record("linear", shape, ms, "ms", bound=bound_ms)
        record("linear", shape, bf16_ms, "ms", bound=bound_ms, peer="bf16" if is_coded else "before")

    def _put(self, key: str, rows: int, value: list[Any] | float | None) -> None:
        self._table.setdefault(key, {})[str(rows)] = value

    def _write(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(self._table.items()))
        self._path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
