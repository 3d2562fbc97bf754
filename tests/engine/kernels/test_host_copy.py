"""engine/kernels/host_copy.py: every word is copied, and none beside them; on a GPU from and to pinned memory."""

import pytest
import torch

from engine.kernels.host_copy import copy_words
from tests.support.steps import DEVICE


def words(*shape: int, host: bool) -> torch.Tensor:
    numbers = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)
    return (numbers.pin_memory() if DEVICE.type == "cuda" else numbers) if host else numbers.to(DEVICE)


@pytest.mark.parametrize("shape", [(1,), (1023,), (5000,), (3, 700)])
@pytest.mark.parametrize("upload", [True, False])
def test_words_are_copied_and_what_lies_behind_them_stays(shape: tuple[int, ...], upload: bool) -> None:
    source, target = words(*shape, host=upload), words(shape[0] + 1, *shape[1:], host=not upload)
    before = target.clone()
    copy_words(source, target[: shape[0]])
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(target[: shape[0]].cpu(), source.cpu())
    assert torch.equal(target[shape[0] :].cpu(), before[shape[0] :].cpu())


@pytest.mark.gpu
def test_a_copy_does_not_wait_behind_a_large_one_of_another_stream() -> None:
    large, there = (
        torch.empty(1 << 30, dtype=torch.uint8).pin_memory(),
        torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE),
    )
    source, target = words(4096, host=True), words(4096, host=False)
    copy_words(source, target)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        there.copy_(large, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        copy_words(source, target)
        done = torch.cuda.Event()
        done.record()
    done.synchronize()
    assert not copied.query(), "the large copy of 20 ms was waited for"
    torch.cuda.synchronize()
