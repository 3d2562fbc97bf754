"""Which replicas of a model compute prompts for the others: a pure decision over counts. It knows no processes and no
clock, and sends nothing.

So many are prefill replicas as settings say, or as the load wants: the part that prompts had of the last steps' time.
A replica that is not there counts for neither, and one at least always answers calls, where a machine has several.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.protocol.types import ReplicaRole

WINDOW_S: Final = 5.0  # of load that is looked at; roles change at most so often
BUSY_MIN: Final = 0.25  # of the replicas' time that steps take, below which nobody is in anybody's way
CHANGE_AT: Final = 0.75  # replicas that there are too many or too few, before one changes: half is not enough
_KEPT: Final = 0.5  # of the part that prompts had before


@dataclass(frozen=True, slots=True)
class RoleCandidate:
    """A replica as roles are given. `ready`: it serves; `running` sequences."""

    name: str
    role: ReplicaRole
    ready: bool
    running: int


def assign_roles(replicas: Sequence[RoleCandidate], prefill: int) -> dict[str, ReplicaRole]:
    """The role of each replica of one model where so many are to compute prompts. Replicas that do go on, then the
    ones with the least to do begin; the rest answers. Where none does, all do both, and so does one that is not
    ready."""
    ready = [each for each in replicas if each.ready]
    if not prefill or not ready:
        return {each.name: ReplicaRole.BOTH for each in replicas}
    order = sorted(ready, key=lambda each: (each.role is not ReplicaRole.PREFILL, each.running, each.name))
    chosen = {each.name for each in order[:prefill]}
    return {
        each.name: ReplicaRole.BOTH
        if not each.ready
        else ReplicaRole.PREFILL
        if each.name in chosen
        else ReplicaRole.DECODE
        for each in replicas
    }


class RoleBalance:
    """How many replicas of one model the load wants to compute prompts. `share`: the part that prompts have of the
    steps' time, `busy`: the part that steps have of the replicas' time; both as of late."""

    def __init__(self) -> None:
        self.share = self.busy = 0.0
        self.prefill = 0
        self._at = -math.inf
        self._prompts_ms = self._steps_ms = 0

    def update(self, now: float, replicas: int, prompts_ms: int, steps_ms: int) -> int:
        """Takes in how long all steps took until now, and prompts in them. Returns how many of so many replicas are to
        compute prompts; it changes by one at a time."""
        self.prefill = max(0, min(self.prefill, replicas - 1))
        if now < self._at + WINDOW_S:
            return self.prefill
        prompts, steps = prompts_ms - self._prompts_ms, steps_ms - self._steps_ms
        seconds, known = now - self._at, min(prompts, steps) >= 0 and self._at > -math.inf
        self._at, self._prompts_ms, self._steps_ms = now, prompts_ms, steps_ms
        if not known or not replicas:  # the first look, or a replica began to count anew
            return self.prefill
        self.busy = steps / (1e3 * seconds * replicas)
        if steps:
            self.share = _KEPT * self.share + (1 - _KEPT) * min(prompts / steps, 1.0)
        wanted = replicas * self.share if self.busy >= BUSY_MIN else 0.0
        if abs(wanted - self.prefill) > CHANGE_AT:
            self.prefill += 1 if wanted > self.prefill else -1
        self.prefill = max(0, min(self.prefill, replicas - 1))
        return self.prefill
