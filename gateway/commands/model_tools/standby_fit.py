"""Which of the catalogue's models can be on this host's devices together, and what of the rest host memory holds: the
arithmetic of `hearth doctor`, from what folders and settings say. Where models are is for their machine to decide.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.hostinfo.memory import DeviceBudget
from gateway.commands.model_tools.size import ModelSizes
from gateway.config import ModelEntryConfig


class SizedModel(NamedTuple):
    entry: ModelEntryConfig
    sizes: ModelSizes

    @property
    def standby_bytes(self) -> int:
        """Of host memory, at the most, while it sleeps there."""
        return self.entry.replicas * (self.sizes.weights_bytes + self.entry.kept_kv_bytes)


def fit_on_devices(rooms: Sequence[DeviceBudget], models: Sequence[SizedModel]) -> list[int] | None:
    """What each device has left once all replicas are on one, the largest first, each where most is left; None where
    one finds no room."""
    left = [room.budget_bytes for room in rooms]
    replicas = [model.sizes.memory_bytes for model in models for _ in range(model.entry.replicas)]
    for needed in sorted(replicas, reverse=True):
        roomiest = max(range(len(left)), key=left.__getitem__)
        if left[roomiest] < needed:
            return None
        left[roomiest] -= needed
    return left


def exceeding_memory(memory_bytes: int, models: Sequence[SizedModel]) -> list[str]:
    """The names of those for which host memory has no place where all sleep at once; who has priority goes first."""
    names = []
    for model in sorted(models, key=lambda model: (-model.entry.priority, model.standby_bytes)):
        if model.standby_bytes > memory_bytes:
            names.append(model.entry.name)
        else:
            memory_bytes -= model.standby_bytes
    return names
