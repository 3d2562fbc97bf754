"""engine/kernels/ranks/handover.py in Triton's interpreter: a process for each stage, over one mapping."""

import mmap
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.ranks import handover
from engine.kernels.ranks.handover import StageWindows, hand_on, mails_bytes, take_over
from engine.kernels.ranks.windows import HEAD_BYTES, RankWindows
from engine.kernels.rms_norm import add_norm
from tests.engine.kernels.ranks.test_exchange import on_all

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a CPU; test_ranks_on_gpus.py has GPUs")
EPSILON = 1e-5
HIDDEN = 48
MAILS = 3


def windows(stages: int) -> list[StageWindows]:
    """New windows as each stage sees them, in memory that forks share."""
    first = HEAD_BYTES
    size = first + mails_bytes(MAILS)
    memory_WB = torch.frombuffer(mmap.mmap(-1, stages * size), dtype=torch.uint8).view(stages, size)
    return [
        StageWindows(memory_WB, rank, (rank + 1) % stages, (rank - 1) % stages, first, MAILS) for rank in range(stages)
    ]


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def added(sum_TH: Tensor, parts_PTH: Tensor | None, behind_H: Tensor | None) -> Tensor:
    """What add_norm makes of the sum."""
    sum_TH = sum_TH.clone()
    if parts_PTH is not None:
        add_norm(sum_TH, parts_PTH, torch.ones(HIDDEN), EPSILON, torch.empty_like(sum_TH), behind_H)
    return sum_TH


@pytest.mark.parametrize("behind", [False, True])
def test_a_stage_gets_the_bits_that_add_norm_would_give_in_one_process(behind: bool) -> None:
    each, sum_TH, parts_PTH = windows(2), numbers(0, 5, HIDDEN), numbers(1, 2, 5, HIDDEN)
    behind_H = numbers(2, HIDDEN) if behind else None

    def run(rank: int) -> Tensor:
        if rank == 0:
            hand_on(each[0], sum_TH, parts_PTH, EPSILON, behind_H)
            return sum_TH
        received_TH = torch.empty_like(sum_TH)
        take_over(each[1], received_TH)
        return received_TH

    sent_TH, received_TH = on_all(2, sum_TH, run)
    assert torch.equal(sent_TH, sum_TH)
    assert torch.equal(received_TH, added(sum_TH, parts_PTH, behind_H))


@pytest.mark.parametrize("stages", [2, 3])
def test_mails_of_all_sizes_go_round_in_order_however_far_their_sender_is_ahead(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage sends two before it takes what comes back, and one more behind each; mails hold 4 rows."""
    monkeypatch.setattr(handover, "MAIL_BYTES", 4 * 4 * HIDDEN)
    monkeypatch.setattr(handover, "PROGRAMS", 3)
    each, sizes = windows(stages), [1, 7, 2, 4, 3, 1]
    given = [numbers(seed, rows, HIDDEN) for seed, rows in enumerate(sizes)]

    def run(rank: int) -> Tensor:
        received = [torch.empty_like(sum_TH) for sum_TH in given]
        if rank == 0:
            for sum_TH in given[:2]:  # as many as fit
                hand_on(each[0], sum_TH, sum_TH[None], EPSILON)
            for index, sum_TH in enumerate(received):
                take_over(each[0], sum_TH)
                for more_TH in given[index + 2 : index + 3]:
                    hand_on(each[0], more_TH, more_TH[None], EPSILON)
        else:
            for sum_TH in received:
                take_over(each[rank], sum_TH)
                hand_on(each[rank], sum_TH, None, EPSILON)
        return torch.cat(received)

    results = on_all(stages, torch.cat(given), run)
    assert all(torch.equal(result, 2 * torch.cat(given)) for result in results)
    counts = [one.memory_WB[one.rank, one.first :].view(torch.int64) for one in each]
    sent = sum(-(-rows // 4) for rows in sizes)
    for words in counts:
        assert [int(words[place.value]) for place in (handover._SENT, handover._TAKEN, handover._RECEIVED)] == 3 * [
            sent
        ]


def test_a_stage_that_waits_for_one_that_never_comes_ends_by_the_abort_word() -> None:
    each = windows(2)
    ending = RankWindows(each[1].memory_WB, 1)
    thread = threading.Timer(0.2, lambda: ending.abort_1.fill_(1))
    thread.start()
    take_over(each[1], torch.empty(2, HIDDEN))
    for _ in range(MAILS + 1):  # nobody takes them
        hand_on(each[1], torch.zeros(2, HIDDEN), None, EPSILON)
    thread.join()


def test_kernels_compile_for_a_gpu_with_counts_that_order_memory_between_devices() -> None:
    program = "from tests.engine.kernels.ranks.test_handover import compiled; compiled()"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.getcwd()}
    said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.splitlines() == ["_hand_on 1 releases, 3 acquires", "_take_over 1 releases, 3 acquires"]


def compiled() -> None:
    """Prints how often each kernel raises a count of another rank, and looks for one."""
    numbers = ("own", "other", "rows", "first", "mails", "hidden", "part_stride", "window", "data_window", "mail")
    types = {name: "i32" for name in (*numbers, "data_head")} | {"words": "*i64", "parts": "*bf16", "epsilon": "fp32"}
    types |= {name: "*fp32" for name in ("total", "behind", "data")}
    for kernel, constants in (
        (handover._hand_on, {"behind": None, "P": 2, "BEHIND": False, "BLOCK": 4096}),
        (handover._take_over, {"BLOCK": 4096}),
    ):
        names = kernel.arg_names
        known = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(
            kernel, {name: known[name] for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )  # fmt: skip
        code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
        released = len(re.findall(r"atom\.global\.sys\.release\.exch\.b64|atom\.release\.sys\.global\.exch", code))
        acquired = len(re.findall(r"(ld|atom)\.\S*sys\S*acquire|(ld|atom)\.acquire\.sys", code))
        print(f"{kernel.fn.__name__} {released} releases, {acquired} acquires")
