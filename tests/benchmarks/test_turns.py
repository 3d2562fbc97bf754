"""benchmarks/engine/turns.py: pairs are what they say, and an engine that ends is told of."""

from pathlib import Path
from typing import cast

import pytest

from benchmarks.engine import turns
from benchmarks.engine.turns import Turns, pairs, two_engines
from engine.protocol.specs import ModelSpec


def test_pairs_take_turns_and_leave_the_first_round_out() -> None:
    sides = [cast(Turns, "first"), cast(Turns, "second")]
    asked: list[tuple[object, int]] = []

    def measure(side: Turns, number: int) -> float:
        asked.append((side, number))
        return 1000.0 if number == 0 else float(number)

    assert pairs(sides, measure, 3) == [2.0, 2.0]
    firsts = [side for (side, number), (_, before) in zip(asked[2:], asked[1:], strict=False) if number != before]
    assert firsts == ["first", "second", "first"]
    assert len(asked) == 8


def test_an_engine_that_ends_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_serve", print)
    nothing = ModelSpec(name="nothing", folder=str(tmp_path / "nothing"))
    with pytest.raises(RuntimeError, match="ended"), two_engines(nothing, nothing, "cpu"):
        pass
