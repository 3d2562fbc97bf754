"""What gateways want of each model, as they say with Wake: how many of their requests wait, and since when. It knows
neither replicas nor why they wait."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.protocol.frames import ModelDemand


@dataclass(frozen=True, slots=True)
class PendingDemand:
    """What waits for one model in gateways: requests, the heaviest account's weight, and since when."""

    requests: int = 0
    weight: float = 1.0
    since: float | None = None


@dataclass(frozen=True, slots=True)
class _DemandReport:
    wake: ModelDemand
    said_at: float
    since: float


class DemandTracker:
    """The last word of each connection on each model. A word that is not repeated holds for `holds_s`, and ends with
    its connection."""

    def __init__(self, models: Iterable[str], holds_s: float) -> None:
        self._holds_s = holds_s
        self._said: dict[str, dict[int, _DemandReport]] = {model: {} for model in models}

    def say(self, connection: int, wake: ModelDemand, now: float) -> None:
        """`connection` is any number that names it. Gateways name other machines' models too: they say nothing here."""
        said = self._said.get(wake.model)
        if said is None:
            return
        before = said.get(connection)
        if wake.requests <= 0:
            said.pop(connection, None)
        else:
            lasting = before is not None and now - before.said_at <= self._holds_s
            said[connection] = _DemandReport(wake, now, before.since if before is not None and lasting else now)

    def drop(self, connection: int) -> None:
        for said in self._said.values():
            said.pop(connection, None)

    def of(self, model: str, now: float) -> PendingDemand:
        said = [each for each in self._said[model].values() if now - each.said_at <= self._holds_s]
        if not said:
            return PendingDemand()
        return PendingDemand(
            sum(each.wake.requests for each in said),
            max(each.wake.weight for each in said),
            min(each.since for each in said),
        )
