"""engine/memory/workspace.py: memory that goes when it is closed, and at no other time."""

import gc

import pytest
import torch

from engine.memory.virtual_memory import Arena
from engine.memory.workspace import Workspace

GPU = torch.device("cuda", 0)


def test_on_a_cpu_there_is_nothing_to_close() -> None:
    workspace = Workspace(Arena.of(torch.device("cpu")), torch.device("cpu"))
    workspace.close()
    with workspace.entered():
        assert (workspace.bytes, workspace.graph_pool) == (0, None)


@pytest.mark.gpu
def test_what_is_closed_is_given_back_whoever_still_refers_to_it() -> None:
    """Tensors do, and cuBLAS, which would compute in it for whoever has the same stream next."""
    arena = Arena.of(GPU)
    workspace = Workspace(arena, GPU)
    with workspace.entered():
        ones = torch.ones(512, 512, device=GPU)
        wanted = (ones @ ones).cpu()
    assert arena.mapped_bytes > 0
    for _ in range(2):
        workspace.close()
        assert arena.mapped_bytes == 0
        assert workspace.graph_pool is None
    del ones
    ones = torch.ones(512, 512, device=GPU)
    assert torch.equal((ones @ ones).cpu(), wanted)


@pytest.mark.gpu
def test_one_that_nobody_closed_may_be_collected_while_another_is_in_use() -> None:
    """Torch ends the process where a pool goes then."""
    forgotten, workspace = (Workspace(Arena.of(GPU), GPU) for _ in range(2))
    with forgotten.entered():
        torch.ones(1, device=GPU)
    with workspace.entered():
        del forgotten
        gc.collect()
        assert torch.ones(1, device=GPU).item() == 1
    workspace.close()
