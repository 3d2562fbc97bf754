"""Replicas that come and go while their agent runs: opened once they are asked for, ended once they have no calls left.
It decides neither which those are nor where weights lie.
"""

from collections.abc import Callable, Iterable
from typing import Final

from engine.host.demand import DemandTracker
from engine.host.replica_handle import ReplicaHandle
from engine.log import log
from engine.placement.rollout import RolloutReplica, WantedModel, decide_rollout
from engine.placement.snapshot import Placement
from engine.protocol.specs import ModelSpec, settings_digest
from engine.protocol.types import Residency

_GRACE_S: Final = 2.0  # a model is removed for gateways first: what is on its way to it then still finds it
_QUIET_S: Final = 1.0  # two reports of a replica's load
_STUCK_S: Final = 10.0  # a replacement that could start, and did not for so long, has no room
_OVERDUE_S: Final = 60.0  # beside what a call may live


class ReplicaRollout:
    """The replicas of an agent by their names, and what is asked for. `replicas` is what the reconciler sees, `demand`
    what gateways report on their models."""

    def __init__(self, open_replica: Callable[[ModelSpec], ReplicaHandle], demand_s: float, request_s: float) -> None:
        """`open_replica` makes a handle without a process; a report of demand holds for demand_s, and no call lives
        longer than request_s."""
        self.replicas: dict[str, ReplicaHandle] = {}
        self.demand = DemandTracker(demand_s)
        self._open_replica = open_replica
        self._request_s = request_s
        self._models: dict[str, ModelSpec] = {}
        self._wanted: dict[str, WantedModel] = {}
        self._settled = True  # all is as it is asked for
        self._opened_at: dict[str, float] = {}

    def follow(self, models: Iterable[ModelSpec], now: float) -> None:
        """Takes in what is asked for from now on. What an agent alone reads of a spec counts at once."""
        self._models = {model.name: model for model in models}
        self._wanted = {
            name: WantedModel(settings_digest(model), model.replicas) for name, model in self._models.items()
        }
        self._settled = False
        self.step(now)
        for replica in self.replicas.values():
            if self._is_wanted(replica):
                replica.model = self._models[replica.model.name]

    def step(self, now: float) -> None:
        """Begins what is to begin now, and takes out what has ended."""
        if self._settled:
            return
        for replica in [each for each in self.replicas.values() if each.leaving_at is not None]:
            self._let_go(replica, now)
        for replica in self.replicas.values():
            replica.replaces = replica.replaces and not replica.ready
        decision = decide_rollout(self._wanted, [self._seen(replica, now) for replica in self.replicas.values()])
        for name in decision.returns:
            self.replicas[name].leaving_at = None
            log("replica_stays", model=self.replicas[name].model.name, replica=name)
        for name in decision.leaves:
            self._leave(self.replicas[name], now)
        for model in decision.starts:
            self._open(self._models[model], now)
        if decision.starts or decision.leaves:
            self._order()
        self._settled = all(
            self._is_wanted(replica) and replica.leaving_at is None and not replica.replaces
            for replica in self.replicas.values()
        )

    def _is_wanted(self, replica: ReplicaHandle) -> bool:
        wanted = self._wanted.get(replica.model.name)
        return wanted is not None and wanted.settings == replica.settings

    def _seen(self, replica: ReplicaHandle, now: float) -> RolloutReplica:
        return RolloutReplica(
            name=replica.name,
            model=replica.model.name,
            settings=replica.settings,
            ready=replica.ready,
            leaving=replica.leaving_at is not None,
            ending=replica.supervisor.process is not None and replica.supervisor.ending,
            stuck=replica.replaces and self._is_stuck(replica, now),
        )

    def _is_stuck(self, replica: ReplicaHandle, now: float) -> bool:
        """Whether a replacement waits for nothing but room: no other replica starts, which it would wait for too. One
        that was tried and died may never run: the former is not given up for it."""
        tried = replica.supervisor.boot > 0
        starting = any(each.supervisor.starting for each in self.replicas.values())
        return not tried and not starting and now - self._opened_at[replica.name] >= _STUCK_S

    def _open(self, model: ModelSpec, now: float) -> None:
        replica = self._open_replica(model)
        replica.replaces = any(each.model.name == model.name for each in self.replicas.values())
        self.replicas[replica.name] = replica
        self._opened_at[replica.name] = now
        if replica.replaces:
            log("replica_replaces", model=model.name, replica=replica.name)

    def _leave(self, replica: ReplicaHandle, now: float) -> None:
        """It is for no new calls from now on; where its model was removed, once gateways know that."""
        name = replica.model.name
        removed = name not in self._models
        replica.leaving_at = now + (_GRACE_S if removed else 0.0)
        successors = [each for each in self.replicas.values() if each.model.name == name and each is not replica]
        why = "its model was removed" if removed else "it is replaced"
        if not removed and not any(each.ready for each in successors) and replica.ready:
            why = "its successor has no room beside it: calls wait from its end until that one serves"
        log("replica_leaves", model=name, replica=replica.name, why=why)

    def _let_go(self, replica: ReplicaHandle, now: float) -> None:
        """Ends a replica that is to go and has no calls, or has had its time; forgets it once it has ended."""
        assert replica.leaving_at is not None
        supervisor = replica.supervisor
        if supervisor.process is None:
            supervisor.close()
            replica.peer.close()
            del self.replicas[replica.name], self._opened_at[replica.name]
            log("replica_left", model=replica.model.name, replica=replica.name)
            self._order()
            return
        if supervisor.ending or now < replica.leaving_at:
            return
        overdue = now >= replica.leaving_at + self._request_s + _OVERDUE_S
        idle = not replica.busy and not self._last_of_demanded(replica, now) and now >= replica.leaving_at + _QUIET_S
        if not replica.ready or idle or overdue:
            ended = Placement(replica.name, Residency.DISK, replica.devices, reason="nothing asks for it any more")
            replica.begin("end", ended, now)

    def _last_of_demanded(self, replica: ReplicaHandle, now: float) -> bool:
        """Whether calls that began before its model was removed wait for it in gateways."""
        removed = replica.model.name not in self._models
        return removed and self.demand.of(replica.model.name, now).requests > 0

    def _order(self) -> None:
        """Keeps the replicas in the order of the catalogue, those that leave last, and demand for all their models."""
        places = {name: place for place, name in enumerate(self._models)}
        ordered = sorted(
            self.replicas.values(),
            key=lambda replica: (places.get(replica.model.name, len(places)), replica.leaving_at is not None),
        )
        self.replicas.clear()
        self.replicas.update({replica.name: replica for replica in ordered})
        self.demand.follow(dict.fromkeys([*self._models, *(replica.model.name for replica in ordered)]))
