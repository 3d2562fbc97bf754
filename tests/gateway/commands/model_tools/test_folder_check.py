"""gateway/commands/model_tools/folder_check.py: on how many devices a model is at once."""

import pytest

from engine.hostinfo.memory import HOST_MEMORY_DEVICE, DeviceBudget
from engine.protocol.specs import ModelSpec
from gateway.commands.model_tools.folder_check import UnservableFolder, _require_ranks


def test_stages_are_for_cpus_and_share_their_memory() -> None:
    spec = ModelSpec(name="m", folder="m", stages=2)
    budget = (1 << 40, 1 << 40, 1 << 40)
    assert _require_ranks(spec, [DeviceBudget(HOST_MEMORY_DEVICE, *budget)]) == 1
    with pytest.raises(UnservableFolder, match="stages = 2 is for CPUs"):
        _require_ranks(spec, [DeviceBudget("GPU 0", *budget), DeviceBudget("GPU 1", *budget)])
