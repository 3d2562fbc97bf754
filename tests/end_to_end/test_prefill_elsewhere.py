"""Calls whose prompt one real replica computes and that another one answers: what clients receive is what they would
have received from one, they pay once, and nothing is left on either side, also where one of the two is lost or hangs.
"""

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.specs import ModelSpec
from engine.protocol.types import ReplicaRole, Residency
from gateway.cluster import prefill_routing
from gateway.cluster.prefill_choice import PrefillChoice, PrefillReason, PrefillSite
from tests.end_to_end.test_resumed_streams import CASES, ENDLESS, STORY, relays, shape, timeless
from tests.support.cut_replica import EMBER_FOLDER, PARTS_PROGRAM, CutReplica
from tests.support.moving_replicas import MovingReplica, nothing_held
from tests.support.served_gateway import Served, looped, served
from tests.support.stub_replica import MODEL
from tests.support.waiting import until

GREEDY = {"messages": STORY, "temperature": 0, **ENDLESS}
PREFILL, DECODE = 0, 1


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[MovingReplica]]:
    spec = ModelSpec(name=MODEL, folder=str(EMBER_FOLDER), handover_bytes=64 << 20)
    command = [sys.executable, "-m", "engine.replica.server"]
    both = [MovingReplica(command, tmp_path_factory.mktemp("roles"), spec) for _ in range(2)]
    for each in both:
        assert each.takes_at
    yield both
    for each in both:
        each.stop()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs, prompts are computed elsewhere."""

    def choose(answers: PrefillSite, sites: Sequence[PrefillSite], tokens: int, copies: int) -> PrefillChoice:
        return (
            PrefillChoice(PrefillReason.REMOTE, 0, 0.0, 0.0)
            if sites
            else PrefillChoice(PrefillReason.LOCAL, None, 0.0, 0.0)
        )

    monkeypatch.setattr(prefill_routing, "choose_prefill", choose)


def give_roles(gateway: Served, *roles: ReplicaRole) -> None:
    for index, role in enumerate(roles):
        gateway.fleet.move(index, Residency.DEVICE, role=role)


async def apart(gateway: Served) -> list[CutReplica]:
    """Has one replica compute the prompts of the other; returns both once the gateway knows."""
    give_roles(gateway, ReplicaRole.PREFILL, ReplicaRole.DECODE)
    known = gateway.app._serving.context.fleet
    await until(lambda: [view.state.role for view in known.replicas()] == [ReplicaRole.PREFILL, ReplicaRole.DECODE])
    return [replica for replica in gateway.fleet.replicas if isinstance(replica, CutReplica)]


def require_same_answers(asked: dict[str, Any], pair: list[MovingReplica], tmp_path: Path) -> None:
    """Where the first of the pair computes the prompt, and the other one answers."""

    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, [each.address for each in pair])) as gateway:
            calm, calm_stream = await gateway.chat(**asked), await gateway.chat(**asked, stream=True)
            assert calm.status == 200, calm.content
            both = await apart(gateway)
            for stream in (False, True):
                counts = [len(each.submits) for each in both]
                answer = await gateway.chat(**asked, stream=stream)
                if stream:
                    assert shape(answer.events) == shape(calm_stream.events)
                else:
                    assert timeless(answer.json) == timeless(calm.json)
                    assert answer.json["usage"]["completion_tokens"] == calm.json["usage"]["completion_tokens"]
                    assert answer.json["usage"]["prompt_tokens"] == calm.json["usage"]["prompt_tokens"]
                first, second = ([*each.submits][count:] for each, count in zip(both, counts, strict=True))
                assert first, "it did not begin where prompts are computed"
                assert not first[0].given
                if both[PREFILL].moved:
                    assert any(given.handover for submit in second for given in submit.given)
            assert both[PREFILL].moved > 0
            await gateway.settled()
            assert len(await gateway.records()) == 4, "each was charged once"

    call()
    nothing_held(*pair)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_computed_elsewhere_has_the_answer_that_it_has_anyway(
    name: str, pair: list[MovingReplica], tmp_path: Path
) -> None:
    require_same_answers({"messages": STORY, **CASES[name]}, pair, tmp_path)


@pytest.mark.usefixtures("elsewhere")
def test_a_prompt_computed_by_two_ranks_is_answered_by_one(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    pair = [
        MovingReplica(
            [sys.executable, str(PARTS_PROGRAM)], tmp_path_factory.mktemp("ranks"),
            ModelSpec(name=MODEL, folder=str(EMBER_FOLDER), dtype="float32", gpus=gpus, handover_bytes=64 << 20), "2",
        )
        for gpus in (2, 1)
    ]  # fmt: skip
    try:
        assert all(each.takes_at for each in pair)
        require_same_answers(GREEDY, pair, tmp_path)
    finally:
        for each in pair:
            each.stop()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("cut", "tokens"), [(PREFILL, 0), (PREFILL, 1), (PREFILL, 3), (DECODE, 1), (DECODE, 6)])
def test_either_side_may_be_lost_at_any_time(cut: int, tokens: int, pair: list[MovingReplica], tmp_path: Path) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, [each.address for each in pair])) as gateway:
            calm = await gateway.chat(**GREEDY)
            both = await apart(gateway)
            both[cut].cut_in = tokens
            answer = await gateway.chat(**GREEDY)
            assert both[cut].deaths == 1, "it was not lost"
            assert timeless(answer.json) == timeless(calm.json)
            await gateway.settled()
            assert len(await gateway.records()) == 2

    call()
    nothing_held(*pair)


@pytest.mark.usefixtures("elsewhere")
def test_where_the_one_that_answers_hangs_the_other_one_answers(pair: list[MovingReplica], tmp_path: Path) -> None:
    long = {**GREEDY, "max_tokens": 1000}  # it still runs when the other one is found out

    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, [each.address for each in pair])) as gateway:
            calm = await gateway.chat(**long)
            both = await apart(gateway)
            pair[DECODE].process.send_signal(signal.SIGSTOP)
            try:
                answer = await gateway.chat(**long)
            finally:
                pair[DECODE].process.send_signal(signal.SIGCONT)
            assert timeless(answer.json) == timeless(calm.json)
            assert (both[PREFILL].stayed, both[PREFILL].moved) == (1, 0)
            assert not [submit for submit in both[DECODE].submits if submit.given], "it went on where it was"

    call()
    nothing_held(*pair)


def test_the_costs_decide_and_roles_change_while_it_serves(pair: list[MovingReplica], tmp_path: Path) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path, relays=relays(tmp_path, [each.address for each in pair])) as gateway:
            fleet = gateway.app._serving.context.fleet
            counters = fleet.counters.prefills[MODEL]
            answers: list[Any] = [(await gateway.chat(**GREEDY)).json]
            assert not counters, "where all do both nothing is moved"
            both = await apart(gateway)
            answers += [(await gateway.chat(**GREEDY)).json for _ in range(6)]
            assert sum(counters.values()) > 0
            give_roles(gateway, ReplicaRole.DECODE, ReplicaRole.PREFILL)
            counts = [len(each.submits) for each in both]
            await until(lambda: fleet.replicas()[DECODE].state.role is ReplicaRole.PREFILL)
            answers += [(await gateway.chat(**GREEDY)).json for _ in range(3)]
            assert len(both[PREFILL].submits) > counts[PREFILL], "the other one answers by now"
            give_roles(gateway, ReplicaRole.BOTH, ReplicaRole.BOTH)
            await until(lambda: fleet.replicas()[DECODE].state.role is ReplicaRole.BOTH)
            before = counters.copy()
            answers.append((await gateway.chat(**GREEDY)).json)
            assert counters == before
            assert all(timeless(answer) == timeless(answers[0]) for answer in answers)

    call()
    nothing_held(*pair)
