"""Which replicas are to come and to go once other models, or other settings, are asked for: a pure decision. It knows
no clock, no processes and no memory, and keeps nothing between two decisions.

    decide_rollout(wanted, replicas) ─► Rollout(starts, leaves, returns)

A replica with the former settings stays until one with the new ones is ready in its place, one at a time; where there
is no room for both, the former leaves first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WantedModel:
    """What is asked for of one model. `settings` is settings_digest of its spec."""

    settings: str
    replicas: int


@dataclass(frozen=True, slots=True)
class RolloutReplica:
    """A replica that there is.

    ready    it serves, or sleeps and would wake.
    leaving  it is to go once it has no calls.
    ending   its process has been told to end: it cannot stay any more.
    stuck    nothing but room is missing to start it, and will be as long as replicas with former settings are there.
    """

    name: str
    model: str
    settings: str
    ready: bool = False
    leaving: bool = False
    ending: bool = False
    stuck: bool = False


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is to begin now.

    starts   a model's name for each replica more.
    leaves   replicas that are to go.
    returns  replicas that were to go, and stay after all.
    """

    starts: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()


def decide_rollout(wanted: Mapping[str, WantedModel], replicas: Sequence[RolloutReplica]) -> Rollout:
    """The changes to begin now; none where all is as it is wanted, or on its way there. Call it again and again."""
    starts: list[str] = []
    leaves = [each.name for each in replicas if each.model not in wanted and not each.leaving]
    returns: list[str] = []
    by_model = {name: list[RolloutReplica]() for name in wanted}
    for each in replicas:
        if each.model in wanted and not each.ending:
            by_model[each.model].append(each)
    for name, model in wanted.items():
        there = by_model[name]
        current = sorted(
            (each for each in there if each.settings == model.settings), key=lambda each: (each.leaving, not each.ready)
        )
        staying, surplus = current[: model.replicas], current[model.replicas :]
        former = [each for each in there if each.settings != model.settings and not each.leaving]
        ready = sum(each.ready for each in staying)
        replaced = [each for each in former if each.ready]  # what serves nothing yet is worth no waiting
        at_once = ready + 1 if replaced else model.replicas
        starts += [name] * max(0, min(model.replicas, at_once) - len(staying))
        kept = max(0, model.replicas - ready - any(each.stuck for each in staying))
        gone = [each for each in former if not each.ready] + replaced[kept:]
        leaves += [each.name for each in (*surplus, *gone) if not each.leaving]
        returns += [each.name for each in staying if each.leaving]
    return Rollout(tuple(starts), tuple(leaves), tuple(returns))
