"""How much gateways want each model: the requests that wait for it there, and since when. It knows neither replicas nor
why the requests wait."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.protocol.frames import ModelDemand


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests that wait for one model: how many, the heaviest account's weight among them, and since when."""

    requests: int = 0
    weight: float = 1.0
    since: float | None = None


class DemandTracker:
    """The last report of each connection on each model that it follows. A report that is not repeated holds for
    `holds_s`, and ends with its connection."""

    def __init__(self, holds_s: float) -> None:
        self._holds_s = holds_s
        self._reports: dict[str, dict[int, tuple[float, Demand]]] = {}  # when, what

    def follow(self, models: Iterable[str]) -> None:
        """Keeps reports on these models from now on, and on no others."""
        self._reports = {model: self._reports.get(model, {}) for model in models}

    def report(self, connection: int, demand: ModelDemand, now: float) -> None:
        """Takes in a gateway's report. `connection` is any number that names it; other models are ignored."""
        reports = self._reports.get(demand.model)
        if reports is None:
            return
        if demand.requests <= 0:
            reports.pop(connection, None)
            return
        reported_at, before = reports.get(connection, (-self._holds_s, Demand()))
        since = before.since if before.since is not None and now - reported_at <= self._holds_s else now
        reports[connection] = now, Demand(demand.requests, demand.weight, since)

    def drop(self, connection: int) -> None:
        """Forgets all that a connection reported."""
        for reports in self._reports.values():
            reports.pop(connection, None)

    def of(self, model: str, now: float) -> Demand:
        """The demand of all gateways together."""
        valid = [demand for reported_at, demand in self._reports[model].values() if now - reported_at <= self._holds_s]
        if not valid:
            return Demand()
        return Demand(
            sum(demand.requests for demand in valid),
            max(demand.weight for demand in valid),
            min(demand.since for demand in valid if demand.since is not None),
        )
