"""engine/placement/rollout.py: what comes and goes for what is asked for, and a simulation in which models come, go and
change while replicas start, sleep, wake, fail and die."""

import random
from dataclasses import dataclass, replace

import pytest

from engine.placement.rollout import Rollout, RolloutReplica, WantedModel, decide_rollout

NEW, OLD = "new", "old"


def wanted(count: int = 1) -> dict[str, WantedModel]:
    return {"m": WantedModel(NEW, count)}


def there(name: str, settings: str = NEW, **state: bool) -> RolloutReplica:
    return RolloutReplica(name, "m", settings, **state)


@pytest.mark.parametrize(
    ("count", "replicas", "expected"),
    [
        pytest.param(2, [], Rollout(starts=("m", "m")), id="a new model is started at once"),
        pytest.param(1, [there("a")], Rollout(), id="one that starts is enough"),
        pytest.param(
            1, [there("o", OLD, ready=True)], Rollout(starts=("m",)), id="a former one waits for its successor"
        ),
        pytest.param(1, [there("o", OLD, ready=True), there("a")], Rollout(), id="and for as long as that takes"),
        pytest.param(
            1, [there("o", OLD, ready=True), there("a", ready=True)], Rollout(leaves=("o",)), id="and leaves then"
        ),
        pytest.param(1, [there("o", OLD)], Rollout(("m",), ("o",)), id="one that serves nothing is not waited for"),
        pytest.param(
            3,
            [there("o", OLD, ready=True), there("p", OLD, ready=True), there("a")],
            Rollout(),
            id="one successor starts at a time",
        ),
        pytest.param(
            2,
            [there("o", OLD, ready=True), there("p", OLD, ready=True), there("a", ready=True)],
            Rollout(("m",), ("p",)),
            id="each takes one's place",
        ),
        pytest.param(
            1,
            [there("o", OLD, ready=True), there("a", stuck=True)],
            Rollout(leaves=("o",)),
            id="without room for both the former leaves first",
        ),
        pytest.param(
            1, [there("a", ready=True), there("b")], Rollout(leaves=("b",)), id="a surplus one leaves, not the ready"
        ),
        pytest.param(1, [there("a", leaving=True)], Rollout(returns=("a",)), id="one that leaves returns"),
        pytest.param(1, [there("a", leaving=True, ending=True)], Rollout(("m",)), id="but not once it ends"),
        pytest.param(1, [there("o", OLD, leaving=True), there("a")], Rollout(), id="what leaves is not asked again"),
    ],
)
def test_a_decision(count: int, replicas: list[RolloutReplica], expected: Rollout) -> None:
    assert decide_rollout(wanted(count), replicas) == expected


def test_a_model_that_nothing_asks_for_leaves() -> None:
    assert decide_rollout({}, [there("a", ready=True), there("b", leaving=True)]) == Rollout(leaves=("a",))


@dataclass
class World:
    """Replicas that obey a rollout, and are hit by chance."""

    chance: random.Random
    replicas: dict[str, RolloutReplica]
    opened: int = 0

    def obey(self, asked: dict[str, WantedModel]) -> None:
        before = self.serving()
        decision = decide_rollout(asked, list(self.replicas.values()))
        assert len({*decision.leaves, *decision.returns}) == len(decision.leaves) + len(decision.returns)
        for name in decision.starts:
            self.opened += 1
            new = RolloutReplica(f"{name}-{self.opened}", name, asked[name].settings)
            self.replicas[new.name] = new
        for name in decision.leaves:
            self.replicas[name] = replace(self.replicas[name], leaving=True)
        for name in decision.returns:
            self.replicas[name] = replace(self.replicas[name], leaving=False)
        for model, stuck in before.items():
            if model in asked and not stuck:
                assert model in self.serving(), f"{model} served, and the rollout took its last replica"
        for model in asked:
            staying = [one for one in self.replicas.values() if one.model == model and not one.leaving]
            assert len(staying) <= asked[model].replicas + len(
                [one for one in staying if one.settings != asked[model].settings]
            )
        assert decide_rollout(asked, list(self.replicas.values())).leaves == (), "what was decided is decided once"

    def serving(self) -> dict[str, bool]:
        """Models with a ready replica that stays, and whether one of theirs is stuck."""
        stuck = {one.model for one in self.replicas.values() if one.stuck}
        return {one.model: one.model in stuck for one in self.replicas.values() if one.ready and not one.leaving}

    def live(self) -> None:
        """A moment: some become ready, some die, some that leave end, some find no room."""
        for name, one in list(self.replicas.items()):
            event = self.chance.random()
            if one.ending or (one.leaving and event < 0.3):
                if one.ending and event < 0.5:
                    del self.replicas[name]
                else:
                    self.replicas[name] = replace(one, ending=True)
            elif not one.ready and event < 0.4:
                self.replicas[name] = replace(one, ready=True, stuck=False)
            elif not one.ready and event < 0.5:
                self.replicas[name] = replace(one, stuck=not one.leaving)
            elif one.ready and event < 0.05:
                self.replicas[name] = replace(one, ready=False)

    def settle(self, asked: dict[str, WantedModel]) -> None:
        """Nothing dies any more: all that starts becomes ready, all that leaves ends."""
        for _ in range(40):
            self.obey(asked)
            self.replicas = {
                name: replace(one, ready=True, stuck=False) for name, one in self.replicas.items() if not one.leaving
            }


@pytest.mark.parametrize("seed", range(150))
def test_whatever_happens_a_model_that_serves_goes_on_and_all_becomes_as_it_is_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    world, asked = World(chance, {}), dict[str, WantedModel]()
    for _ in range(200):
        if chance.random() < 0.15:
            name = chance.choice("abcd")
            if chance.random() < 0.3:
                asked.pop(name, None)
            else:
                asked[name] = WantedModel(str(chance.randrange(3)), chance.randrange(1, 4))
        world.obey(asked)
        world.live()
    world.settle(asked)
    found = sorted((one.model, one.settings) for one in world.replicas.values())
    assert found == sorted((name, model.settings) for name, model in asked.items() for _ in range(model.replicas))
