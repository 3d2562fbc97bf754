"""The replicas of one model as calls look them up. It knows neither connections nor machines, and costs what changes,
not what there is."""

from collections import Counter
from typing import Final

from gateway.cluster.client import kv_model
from gateway.cluster.prefill_routing import PrefillRouter
from gateway.cluster.prefix_directory import PrefixDirectory
from gateway.cluster.replica_entry import ReplicaEntry, Standing
from gateway.cluster.route import ReplicaRing

_EVERYWHERE: Final[tuple[str, ...]] = ()
_NOWHERE: Final = (Standing.CLOSED, "")
_VIEWS_MAX: Final = 64  # of a pool, for as many sets of regions that accounts allow


class StandingRings:
    """Replicas by their standing."""

    def __init__(self) -> None:
        self._rings = {standing: ReplicaRing[ReplicaEntry]() for standing in Standing if standing}

    @property
    def serving(self) -> ReplicaRing[ReplicaEntry]:
        """Replicas that serve now; where none does, those that compute prompts for others, and then those that are to
        go."""
        return self._rings[Standing.SERVING] or self._rings[Standing.PREFILLING] or self._rings[Standing.LEAVING]

    @property
    def prefillers(self) -> ReplicaRing[ReplicaEntry]:
        """Replicas that compute prompts for those that serve; none where none does."""
        return self._rings[Standing.PREFILLING] if self._rings[Standing.SERVING] else ReplicaRing()

    @property
    def able(self) -> ReplicaRing[ReplicaEntry]:
        """Replicas that serve now; if none, those about to, where requests queue."""
        return self.serving or self._rings[Standing.COMING]

    def move(self, entry: ReplicaEntry, before: Standing, now: Standing) -> None:
        if before is now:
            return
        if before:
            self._rings[before].remove(entry.state.address, entry)
        if now:
            self._rings[now].add(entry.state.address, entry)


class ModelPool:
    """Replicas that differ in what they compute with are not mixed: calls go to those that most agree with.

    directory  which of them have which prefixes.
    prefill  which of them computes a prompt for another; how often which is in `prefills`.
    entries  all of them, in the order in which they were reported, with standing and region.
    model    what the replicas compute with that calls go to; empty while none is known.
    """

    def __init__(self, route_key: bytes = b"", prefills: Counter[str] | None = None) -> None:
        self.directory = PrefixDirectory(route_key)
        self.prefill = PrefillRouter(Counter() if prefills is None else prefills)
        self.entries: dict[ReplicaEntry, tuple[Standing, str]] = {}
        self.model = ""
        self._views = {_EVERYWHERE: StandingRings()}
        self._models: dict[ReplicaEntry, str] = {}
        self._votes: Counter[str] = Counter()

    def within(self, regions: tuple[str, ...]) -> StandingRings:
        """The replicas for calls that may be served in these regions, without any in all. Costs what there is where
        nobody asked for these before, and nothing later."""
        if (view := self._views.get(regions)) is None:
            if len(self._views) >= _VIEWS_MAX:
                self._views = {_EVERYWHERE: self._views[_EVERYWHERE]}
            self._views[regions] = view = StandingRings()
            for entry, (standing, region) in self.entries.items():
                if region in regions:
                    view.move(entry, Standing.CLOSED, standing)
        return view

    @property
    def serving(self) -> ReplicaRing[ReplicaEntry]:
        """Replicas that serve now, wherever they are."""
        return self._views[_EVERYWHERE].serving

    @property
    def able(self) -> ReplicaRing[ReplicaEntry]:
        """Replicas that serve now or soon, wherever they are."""
        return self._views[_EVERYWHERE].able

    @property
    def known(self) -> ReplicaEntry | None:
        """A replica that has said what it is, on the device if there is one."""
        return next(iter(self.able), None) or next((entry for entry in self.entries if entry.ready), None)

    def holders(
        self, shared: tuple[int, bytes, int], tokens: bytes, regions: tuple[str, ...]
    ) -> list[tuple[ReplicaEntry, float]]:
        """As PrefixDirectory.holders, of those that serve, or compute prompts for others, in these regions."""
        held = self.directory.holders(shared, tokens)
        return [(entry, spared) for entry, spared in held if self._serves(entry, regions)]

    def _serves(self, entry: ReplicaEntry, regions: tuple[str, ...]) -> bool:
        standing, region = self.entries.get(entry, _NOWHERE)
        return standing >= Standing.PREFILLING and (not regions or region in regions)

    def able_as(self, model: str, regions: tuple[str, ...], besides: object = None) -> ReplicaRing[ReplicaEntry]:
        """Replicas that can go on with what another one of this model began, without the connection `besides`; where
        there are none, those on another number of GPUs."""
        ring = self.within(regions).able
        others = [(entry, _resumes_as(entry)) for entry in ring if entry.connection is not besides]
        able = [entry for entry, own in others if own == model]
        able = able or [entry for entry, own in others if kv_model(own) == kv_model(model)]
        if len(able) == len(ring):
            return ring
        some = ReplicaRing[ReplicaEntry]()
        for entry in able:
            some.add(entry.state.address, entry)
        return some

    def place(self, entry: ReplicaEntry) -> None:
        """Takes in what has changed of a replica, or that it is there."""
        self.directory.follow(entry)
        leaves = entry.state.leaving or entry.machine.report.draining  # others that could serve need not agree with it
        self._vote(entry, None if leaves else entry.model)
        entry.differs = entry.model is not None and not _alike(entry.model, self.model) and not leaves
        self._move(entry, entry.standing)

    def remove(self, entry: ReplicaEntry) -> None:
        self.directory.forget(entry)
        self._vote(entry, None)
        self._move(entry, Standing.CLOSED)
        del self.entries[entry]

    def _move(self, entry: ReplicaEntry, standing: Standing) -> None:
        before, now = self.entries.get(entry, _NOWHERE), (standing, entry.region)
        self.entries[entry] = now
        if before != now:
            for regions, view in self._views.items():
                seen = [each if not regions or region in regions else Standing.CLOSED for each, region in (before, now)]
                view.move(entry, *seen)

    def _vote(self, entry: ReplicaEntry, model: str | None) -> None:
        """Counts what a replica computes with. Where the most change, so does who may serve."""
        before = self._models.pop(entry, None)
        if model is not None:
            self._models[entry] = model
        if before == model:
            return
        if before is not None:
            self._votes[before] -= 1
            self._votes += Counter()  # without those of nobody
        if model is not None:
            self._votes[model] += 1
        most = max(self._votes, key=lambda each: (self._votes[each], each), default="")
        if most != self.model:
            self.model = most
            for other in [*self.entries]:
                if other is not entry:
                    self.place(other)


def _alike(one: str, other: str) -> bool:
    """Whether two replicas compute with the same, as far as both tell: older ones name their weights alone."""
    return one == other or one.startswith(f"{other}:") or other.startswith(f"{one}:")


def _resumes_as(entry: ReplicaEntry) -> str:
    """What it computes with; empty where it goes on with nothing that another one began."""
    return entry.connection.model if entry.connection is not None and entry.connection.resumes else ""
