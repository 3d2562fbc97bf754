"""benchmarks/linear without a GPU: what it tries can run, and what it writes is what the engine reads."""

import json
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from time import sleep

import pytest
import torch

from benchmarks.engine.linear import alone, chain
from benchmarks.engine.linear.alone import Measured, Timed, finalists
from benchmarks.engine.linear.chain import Chain, Choices, DeviceLostError, descend, shapes_in_turn, worth_trying
from benchmarks.engine.linear.shapes import (
    CODED_CANDIDATES_MOST,
    MODELS,
    AnyTiling,
    Shape,
    Work,
    coded_candidates,
    tilings_of,
    works_of,
)
from benchmarks.engine.linear.table import Found, numbers_of
from engine.bf12.codec import Bf12Weight, EscapeIndex
from engine.kernels import bf12_linear, bf12_linear_hopper, tuning
from engine.kernels.bf12_decode import expand
from engine.kernels.bf12_linear import Bf12Tiling
from engine.kernels.bf12_linear_hopper import HopperTiling
from engine.kernels.linear import LinearTiling
from engine.kernels.tuning import BF12_ROW_BUCKETS, select_bf12_tiling, select_tiling

CPU = torch.device("cpu")
TILING, TILE = Bf12Tiling(64, 1, 2, 3, 4, 4), HopperTiling(128, 4)
ALL = sorted({shape for model in MODELS.values() for shape in model.shapes})


def launched(shape: Shape, rows: int, tiling: Bf12Tiling, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel takes the tiling, up to its launch."""
    outputs, inputs, gated = shape
    kernels = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return lambda *arguments, **options: kernels.append(grid)

    for name in ("_multiply_row", "_multiply_rows"):
        monkeypatch.setattr(bf12_linear, name, Kernel())
    none = torch.zeros(0)
    weight = Bf12Weight(
        torch.empty(outputs, inputs // 8 * 3, dtype=torch.int32, device="meta"), EscapeIndex(none, none, none, none)
    )
    x_TK = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
    (bf12_linear.multiply_gated if gated else bf12_linear.multiply)(x_TK, weight, tiling)
    return bool(kernels)


@pytest.mark.parametrize("shape", ALL, ids=str)
def test_the_few_candidates_for_few_rows_are_taken_by_their_kernel(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, inputs, gated = shape
    for rows in BF12_ROW_BUCKETS:
        found = coded_candidates(outputs, inputs, rows, gated)
        assert len(found) == len(set(found)) <= CODED_CANDIDATES_MOST
        assert bool(found) == (rows <= 64)
        assert all(launched(shape, rows, tiling, monkeypatch) for tiling in found)


def test_tiles_are_tried_where_they_run_and_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work((4096, 4096, False), 128, True)
    assert not any(isinstance(tiling, HopperTiling) for tiling in tilings_of(work, CPU))
    monkeypatch.setattr(bf12_linear_hopper, "serves", lambda outputs, gated, device: True)
    monkeypatch.setattr(bf12_linear_hopper, "multiprocessors_of", lambda device: 132)
    assert tilings_of(work, CPU) == [
        *coded_candidates(4096, 4096, 128, False), *tuning.candidate_tilings(4096, 4096, 128, False, 132)
    ]  # fmt: skip
    few = Work((4096, 4096, False), 64, True)
    assert tilings_of(few, CPU) == coded_candidates(4096, 4096, 64, False) != []
    assert all(isinstance(tiling, HopperTiling) for tiling in tilings_of(Work((4096, 4096, False), 2048, True), CPU))
    assert all(isinstance(tiling, LinearTiling) for tiling in tilings_of(Work((4096, 4096, False), 64, False), CPU))


def test_every_bucket_of_a_model_is_measured_but_a_heads_of_prompts() -> None:
    works = works_of(["llama-3.1-8b"], None, "bf12")
    assert len(works) == 4 * len(BF12_ROW_BUCKETS) + 8
    assert {work.rows for work in works if work.shape[0] == 128256} == {1, 8, 16, 32, 64, 128, 256, 512}
    assert works_of(["llama-3.1-8b"], [1], None)[::5] == [
        Work((6144, 4096, False), 1, False), Work((6144, 4096, False), 1, True)
    ]  # fmt: skip


def test_few_rows_are_bound_by_memory_and_many_by_arithmetic() -> None:
    assert Work((4096, 4096, False), 1, True).bound_us == pytest.approx(4096 * 4096 * 1.5 / 4.3e6)
    assert Work((4096, 4096, False), 1, False).bound_us == pytest.approx(4096 * 4096 * 2 / 4.3e6)
    assert Work((4096, 4096, False), 8192, True).bound_us == pytest.approx(2 * 8192 * 4096 * 4096 / 790e6)


def test_the_fastest_of_each_kernel_and_the_library_are_in_the_final() -> None:
    tiles = [HopperTiling(rows, parts) for rows, parts in product((128, 256), (1, 2, 3))]
    slow = [Bf12Tiling(64, 1, parts, 3, 4, 4) for parts in (1, 2)]
    first: dict[AnyTiling | None, float] = {tile: 1.0 + place for place, tile in enumerate(tiles)} | {
        slow[1]: 20.0,
        slow[0]: 21.0,
        None: 30.0,
    }
    assert finalists(first) == {*tiles[:4], slow[1], None}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is written here is what the engine reads."""
    monkeypatch.setattr(tuning, "load_table", lambda gpu: json.loads((tmp_path / "gpu.json").read_text()))
    for name in ("_select_tiling", "_select_bf12_tiling"):
        monkeypatch.setattr(tuning, name, getattr(tuning, name).__wrapped__)
    return tmp_path / "gpu.json"


def put(table: Path, shape: Shape, rows: int, is_coded: bool, *found: tuple[float, object]) -> None:
    adding = Found(table, keeps=False)
    adding.add(Measured(Work(shape, rows, is_coded), [Timed(us, tiling) for us, tiling in found], [], 10.0))  # type: ignore[arg-type]
    adding._write()


@pytest.mark.parametrize("wins", [TILING, TILE])
def test_what_is_fastest_is_what_the_engine_takes(wins: Bf12Tiling | HopperTiling, table: Path) -> None:
    put(table, (96, 256, False), 64, True, (8.0, wins), (9.0, None))
    put(table, (96, 256, False), 8192, True, (7.99, TILE), (8.0, None))
    assert select_bf12_tiling(96, 256, 40, False, CPU) == wins
    assert select_bf12_tiling(96, 256, 8000, False, CPU) is None, "too little is won"
    assert json.loads(table.read_text())["96x256 bf12 / bf16"] == {"64": 0.8, "8192": 0.8}


def test_where_nothing_beats_the_library_a_gated_matrix_is_expanded(table: Path) -> None:
    put(table, (96, 256, True), 8, True, (8.0, None), (9.0, TILE))
    assert select_bf12_tiling(96, 256, 8, True, CPU) is None
    assert select_bf12_tiling(96, 256, 8, False, CPU) is None, "the product that is gated after it"


def test_the_table_of_bf16_has_numbers_alone(table: Path) -> None:
    put(table, (96, 256, False), 16, False, (8.0, LinearTiling(32, 16, 2, 2, 4)), (9.0, None))
    assert json.loads(table.read_text()) == {"96x256": {"16": [32, 16, 2, 2, 4]}}
    assert select_tiling(96, 256, 9, False, CPU) == LinearTiling(32, 16, 2, 2, 4)


def test_numbers_are_those_of_the_kernel_before_them() -> None:
    assert numbers_of(None) is None
    assert numbers_of(TILE) == ["coded_hopper", 128, 4]
    assert numbers_of(TILING) == ["coded", 64, 1, 2, 3, 4, 4]


def test_made_up_weights_are_what_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "GPU", CPU)
    monkeypatch.setattr(alone, "_copies", lambda weight_bytes: 3)
    plain, words = alone.random_weights((384, 256, False), True)
    assert len(plain) == len(words) == 3
    assert all(torch.equal(weight_NK, plain[0]) for weight_NK in plain)
    expanded_NK = torch.empty(384, 256)
    expand(words[2], expanded_NK, range(384))
    assert torch.equal(expanded_NK, plain[0].float())


def test_what_fails_costs_no_other_its_result() -> None:
    with ThreadPool(2) as pool:
        assert sorted(alone.done(pool, lambda number: 12 // number, [3, 0, 4])) == [3, 4]


def test_what_is_stuck_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_STUCK_S", 0.01)
    with ThreadPool(1) as pool, pytest.raises(SystemExit, match="Stuck"):
        next(alone.done(pool, lambda number: sleep(0.3), [1]))


QKV, DOWN = (6144, 4096, False), (4096, 14336, False)
A, B, C = (Bf12Tiling(64, 1, 1, stages, 4, 4) for stages in (2, 3, 4))


def test_the_descent_finds_what_is_fastest_together() -> None:
    took = {(A, A): 10.0, (A, B): 9.0, (B, A): 10.5, (B, B): 8.0}

    def chain_ms(choices: Choices) -> float:
        return took[choices[QKV], choices[DOWN]]  # type: ignore[index]

    steps = [*descend({QKV: A, DOWN: A}, {QKV: [A, B], DOWN: [A, B]}, chain_ms)]
    assert [(step.shape, step.became) for step in steps] == [(QKV, A), (DOWN, B), (QKV, B), (DOWN, B)]
    assert (steps[2].before_ms, steps[2].after_ms) == (9.0, 8.0)


def test_what_may_be_chance_or_fails_changes_nothing() -> None:
    def chain_ms(choices: Choices) -> float:
        if choices[QKV] == C:
            raise RuntimeError
        return {A: 10.0, B: 9.98}[choices[QKV]]  # type: ignore[index]

    assert [step.became for step in descend({QKV: A}, {QKV: [A, B, C]}, chain_ms)] == [A]


def test_a_lost_device_ends_the_descent() -> None:
    def chain_ms(choices: Choices) -> float:
        raise DeviceLostError

    with pytest.raises(DeviceLostError):
        next(descend({QKV: A}, {QKV: [A, B]}, chain_ms))


def test_the_slow_alone_are_not_tried() -> None:
    measured = Measured(Work(QKV, 8, True), [Timed(10.0, A), Timed(20.0, None)], [Timed(12.0, C), Timed(15.0, B)], 9.0)
    assert worth_trying(measured) == [A, C]


def test_a_chain_is_in_the_order_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ran = MODELS["qwen3-0.6b"], list[object]()
    monkeypatch.setattr(chain, "GPU", CPU)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(chain, "add_norm", lambda *arguments: ran.append("norm"))

    def call(shape: Shape) -> alone.Call:
        def multiply(x_TK: torch.Tensor, weight: int) -> torch.Tensor:
            assert x_TK.shape == (2, shape[1])
            ran.append((shape, weight))
            return torch.zeros(2, shape[0] // 2 if shape[2] else shape[0])

        return multiply

    Chain(model, 2).run({shape: call(shape) for shape in model.shapes}, {shape: [0, 1] for shape in model.shapes}, 2)
    layers = [
        ["norm", (model.qkv, layer), (model.output, layer), "norm", (model.gate_up, layer), (model.down, layer)]
        for layer in (0, 1)
    ]
    assert ran == [*layers[0], *layers[1], "norm", (model.head, 0)]
    assert shapes_in_turn(MODELS["llama-3.1-8b"])[0] == (28672, 4096, True)
