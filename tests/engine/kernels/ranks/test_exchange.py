"""engine/kernels/ranks/exchange.py in Triton's interpreter: a process for each rank, over one mapping."""

import mmap
import os
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import reference as ops
from engine.kernels.ranks import exchange as rank_exchange
from engine.kernels.ranks import gather as rank_gather
from engine.kernels.ranks import windows as rank_windows
from engine.kernels.ranks.exchange import add_norm_ranks, share_tokens
from engine.kernels.ranks.gather import gather_columns
from engine.kernels.ranks.windows import DATA_BEGINS, EPOCH_WORD, RankWindows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_exchange_gpu.py has GPUs")
EPSILON = 1e-5
HIDDEN = 48
PLACES = ("window", "data_window", "data_first", "half")


def windows(ranks: int, half_bytes: int = 64 << 10) -> list[RankWindows]:
    """New windows as each rank sees them, in memory that forks share."""
    size = DATA_BEGINS + 2 * half_bytes
    memory_WB = torch.frombuffer(mmap.mmap(-1, ranks * size), dtype=torch.uint8).view(ranks, size)
    return [RankWindows(memory_WB, rank) for rank in range(ranks)]


def on_all(ranks: int, like: Tensor, run: Callable[[int], Tensor]) -> list[Tensor]:
    """What `run` gives on each rank, of which each is a process: tensors like this one."""
    results = torch.frombuffer(mmap.mmap(-1, ranks * like.nbytes), dtype=torch.uint8).view(ranks, -1)
    pids = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                results[rank].copy_(run(rank).contiguous().view(-1).view(torch.uint8))
                status = 0
            except BaseException:
                traceback.print_exc()
            os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks
    return [each.view(like.dtype).view(like.shape) for each in results]


def made(ranks: int, rows: int, parts: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "sum_TH": numbers(rows, HIDDEN), "parts_WPTH": numbers(ranks, parts, rows, HIDDEN),
        "weight_H": numbers(HIDDEN), "behind_H": numbers(HIDDEN),
    }  # fmt: skip


def expected(given: dict[str, Any], dtype: torch.dtype, two_shot: bool, behind: bool = False) -> Tensor:
    """The sum and its norm, [2, T, H], as torch has them."""
    parts_WTH = given["parts_WPTH"].sum(1).to(dtype).float()
    added_TH = ops.sum_parts(parts_WTH)
    if two_shot:
        added_TH = added_TH.to(dtype).float()
    if behind:
        added_TH = ops.rms_norm(added_TH, given["behind_H"], EPSILON, torch.float32)
    sum_TH = given["sum_TH"] + added_TH
    return torch.stack((sum_TH, ops.rms_norm(sum_TH, given["weight_H"], EPSILON, torch.float32)))


def summed(
    each: list[RankWindows], given: list[dict[str, Any]], dtype: torch.dtype = torch.float32, behind: bool = False
) -> list[Tensor]:
    """Sum and norm of the last of these on each rank, which compute all of them."""

    def run(rank: int) -> Tensor:
        for one in given:
            sum_TH, out_TH = one["sum_TH"].clone(), torch.empty(one["sum_TH"].shape, dtype=dtype)
            add_norm_ranks(
                each[rank], sum_TH, one["parts_WPTH"][rank], one["weight_H"], EPSILON, out_TH,
                one["behind_H"] if behind else None,
            )  # fmt: skip
        return torch.stack((sum_TH, out_TH.float()))

    return on_all(len(each), torch.empty(2, *given[-1]["sum_TH"].shape), run)


def by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all exchanges go in one way."""
    if way != "few rows":
        monkeypatch.setattr(rank_exchange, "_FEW_ROWS", 0)
    if way == "two shots":
        monkeypatch.setattr(rank_exchange, "ONE_SHOT_BYTES", 0)


@pytest.mark.parametrize(
    ("ranks", "way"),
    [(2, "few rows"), (2, "one shot"), (3, "few rows"), (3, "one shot"), (3, "two shots"), (4, "two shots")],
)
def test_all_ranks_get_the_bits_of_one_sum(ranks: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by(way, monkeypatch)
    given = made(ranks, rows=5)
    given["parts_WPTH"][:, :, 1], given["parts_WPTH"][1, :, 2] = -0.0, 0.0  # numbers that a reader could wait for
    results = summed(windows(ranks), [given] * 3)
    assert all(torch.equal(each, results[0]) for each in results)
    torch.testing.assert_close(results[0], expected(given, torch.float32, way == "two shots"))


@pytest.mark.parametrize("way", ["few rows", "one shot", "two shots"])
def test_what_is_sent_is_rounded_as_the_model_is_and_may_be_normed_before_it_is_added(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(way, monkeypatch)
    given = made(3, rows=4, parts=1)
    results = summed(windows(3), [given], torch.float16, behind=True)  # the interpreter cuts bfloat16 off
    assert torch.equal(results[0], results[2])
    wanted = expected(given, torch.float16, way == "two shots", behind=True)
    torch.testing.assert_close(results[0][0], wanted[0])
    torch.testing.assert_close(results[0][1], wanted[1].half().float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_exchanges_of_all_sizes_follow_one_another_in_both_halves(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that hold 4 rows of each other rank, and fewer where rows are sent on; up to 9 rows go in runs, one or
    two without flags."""
    monkeypatch.setattr(rank_exchange, "_FEW_ROWS", 2)
    each = windows(ranks, half_bytes=4 * (ranks - 1) * HIDDEN * 4)
    given = [made(ranks, rows, seed=seed) for seed, rows in enumerate((1, 9, 2, 4, 8, 5, 3, 9, 1))]
    results = summed(each, given)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], expected(given[-1], torch.float32, two_shot=False))
    epochs = (
        each[0].words()[EPOCH_WORD],
        each[1].words()[each[1].memory_WB.shape[1] // 8 + EPOCH_WORD],
    )
    assert epochs[0] == epochs[1] > len(given)  # some went in runs


@pytest.mark.parametrize("epoch", [2**31 - 2, 2**32 - 2, 2**40])
def test_epochs_pass_what_32_bits_hold(epoch: int) -> None:
    each = windows(2)
    for one in each:
        one.memory_WB[one.rank].view(torch.int64)[EPOCH_WORD] = epoch
    given = [made(2, rows=2, seed=seed) for seed in range(4)]
    results = summed(each, given)
    torch.testing.assert_close(results[1], expected(given[-1], torch.float32, two_shot=False))
    assert each[0].words()[EPOCH_WORD] == epoch + 4


def test_programs_that_were_not_used_for_long_wait_for_the_present_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_exchange, "_FEW_ROWS", 0)
    monkeypatch.setattr(rank_windows, "PROGRAMS", 3)  # rows go round among three programs, several at once
    given = [made(2, rows, seed=seed) for seed, rows in enumerate((16, 1, 1, 1, 7, 5))]
    results = summed(windows(2), given)
    assert torch.equal(results[0], results[1])
    torch.testing.assert_close(results[0], expected(given[-1], torch.float32, two_shot=False))


@pytest.mark.parametrize("way", ["few rows", "one shot"])
def test_a_rank_that_waits_for_one_that_never_comes_ends_by_the_abort_word(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by(way, monkeypatch)
    each, given = windows(2), made(2, rows=2)
    thread = threading.Timer(0.2, lambda: each[0].abort_1.fill_(1))
    thread.start()
    out_TH = torch.empty(2, HIDDEN)
    add_norm_ranks(each[0], given["sum_TH"], given["parts_WPTH"][0], given["weight_H"], EPSILON, out_TH)
    thread.join()
    assert int(each[0].abort_1) == 1


@pytest.mark.parametrize("half_bytes", [64 << 10, 2 * 51 * 4 * 2 + 31])
def test_rank_0_gets_the_columns_of_all(half_bytes: int) -> None:
    """The second windows hold two rows."""
    firsts, rows = [0, 50, 101], 5
    whole_RV = torch.randn(rows, 101, generator=torch.Generator().manual_seed(1))
    each, firsts_W1 = windows(2, -(-half_bytes // 16) * 16), torch.tensor(firsts, dtype=torch.int32)

    def run(rank: int) -> Tensor:
        own_RV = whole_RV[:, firsts[rank] : firsts[rank + 1]].contiguous()
        for _ in range(3):
            gathered_RV = gather_columns(each[rank], own_RV, firsts_W1, firsts)
        return gathered_RV if rank == 0 else torch.nn.functional.pad(gathered_RV, (50, 0))

    first, second = on_all(2, whole_RV, run)
    assert torch.equal(first, whole_RV)
    assert torch.equal(second[:, 50:], whole_RV[:, 50:])


def test_all_ranks_get_the_tokens_of_rank_0() -> None:
    each = windows(3)

    def run(rank: int) -> Tensor:
        tokens_R = torch.arange(7, dtype=torch.int32) * (10 if rank == 0 else -1)
        share_tokens(each[rank], tokens_R)
        return tokens_R

    given = on_all(3, torch.zeros(7, dtype=torch.int32), run)
    assert all(tokens_R.tolist() == [0, 10, 20, 30, 40, 50, 60] for tokens_R in given)


def test_kernels_compile_for_a_gpu_with_flags_that_order_memory_between_devices() -> None:
    """A new process compiles them for an H100, without one; the interpreter would take them here."""
    program = "from tests.engine.kernels.ranks.test_exchange import compiled; compiled()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    signals = {
        "_sum_few_rows": (0, 1 / 3),
        "_sum_one_shot": (2, 1),
        "_sum_two_shot": (2, 2),
        "_gather_columns": (1, 1),
        "_share_tokens": (1, 1),
    }
    assert said.stdout.splitlines() == [
        f"{kernel} {raised} releases, {6 * awaited:.0f} acquires"  # once, in a loop, and of the abort word
        for kernel, (raised, awaited) in signals.items()
    ]


def compiled() -> None:
    """Prints how often each kernel of two ranks raises a flag, and where it looks for one."""
    windows = {"words": "*i64", "data": "*bf16", "rank": "i32", **dict.fromkeys(PLACES, "i32")}
    sums = {
        "total": "*fp32", "parts": "*bf16", "weight": "*fp32", "out": "*bf16", "rows": "i32", "hidden": "i32",
        "part_stride": "i32", "epsilon": "fp32",
    }  # fmt: skip
    gathers = {"own": "*bf16", "whole": "*bf16", "first_columns": "*i32", "rows": "i32", "width": "i32",
               "vocabulary": "i32"}  # fmt: skip
    shares = {"tokens": "*i32", "count": "i32", "data": "*i32"}
    summing = {"behind": None, "P": 2, "W": 2, "BEHIND": False, "BLOCK": 4096}
    for kernel, types, constants in (
        (rank_exchange._sum_few_rows, {**sums, "data": "*i16"}, summing),
        (rank_exchange._sum_one_shot, sums, {**summing, "AT_ONCE": 2}),
        (rank_exchange._sum_two_shot, sums, summing),
        (rank_gather._gather_columns, gathers, {"W": 2, "BLOCK": 2048}),
        (rank_exchange._share_tokens, shares, {"W": 2, "BLOCK": 512}),
    ):
        names = kernel.arg_names
        known = {**windows, **types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(
            kernel, {name: known[name] for name in names},
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in (*PLACES, "words", "data")},
        )  # fmt: skip
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        released = len(re.findall(r"atom\.global\.sys\.release\.exch\.b64|atom\.release\.sys\.global\.exch", code))
        acquired = len(re.findall(r"(ld|atom)\.\S*sys\S*acquire|(ld|atom)\.acquire\.sys", code))
        print(f"{kernel.fn.__name__} {released // 2} releases, {acquired} acquires")
