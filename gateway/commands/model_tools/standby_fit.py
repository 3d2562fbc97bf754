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
        """Host memory that its replicas take at most while they sleep there."""
        return self.entry.replicas * (self.sizes.weights_bytes + self.entry.kept_kv_bytes)


def fit_on_devices(budgets: Sequence[DeviceBudget], models: Sequence[SizedModel]) -> list[int] | None:
    """What each device has left once every replica is on one, placed largest first where most is left; None if one does
    not fit."""
    left = [budget.budget_bytes for budget in budgets]
    replicas = [model.sizes.memory_bytes for model in models for _ in range(model.entry.replicas)]
    for needed in sorted(replicas, reverse=True):
        roomiest = max(range(len(left)), key=left.__getitem__)
        if left[roomiest] < needed:
            return None
        left[roomiest] -= needed
    return left


def exceeding_memory(memory_bytes: int, models: Sequence[SizedModel]) -> list[str]:
    """Names of the models that host memory does not hold once all sleep; it holds those of high priority first."""
    names = []
    for model in sorted(models, key=lambda model: (-model.entry.priority, model.standby_bytes)):
        if model.standby_bytes > memory_bytes:
            names.append(model.entry.name)
        else:
            memory_bytes -= model.standby_bytes
    return names
