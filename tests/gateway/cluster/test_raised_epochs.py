"""Every replica is told of each raised epoch once: those that are connected, and others when they are."""

from pathlib import Path

import pytest

from gateway.cluster import raised_epochs
from gateway.cluster.raised_epochs import RaisedEpochs
from tests.support.admin_api import served_admin
from tests.support.linked_fleet import connected
from tests.support.served_gateway import looped
from tests.support.waiting import holds, until


@looped
async def test_all_replicas_are_told_at_once_and_one_that_comes_back_again(tmp_path: Path) -> None:
    async with connected(tmp_path, 3) as (stub, fleet):
        fleet.epochs.add({b"a" * 16: 1, b"b" * 16: 4})
        await until(lambda: all(replica.epochs == {b"a" * 16: 1, b"b" * 16: 4} for replica in stub.replicas))
        stub.replicas[0].epochs.clear()
        stub.replicas[0].die()
        await until(lambda: stub.replicas[0].epochs == {b"a" * 16: 1, b"b" * 16: 4})
        fleet.epochs.add({b"a" * 16: 2})
        await until(lambda: all(replica.epochs[b"a" * 16] == 2 for replica in stub.replicas))


@looped
async def test_a_replica_of_a_version_before_hears_nothing_that_it_cannot_read(tmp_path: Path) -> None:
    async with connected(tmp_path, 2) as (stub, fleet):
        stub.behaviour.raises_epochs = False
        stub.replicas[0].die()
        await until(lambda: stub.replicas[0].connections and fleet.replicas()[0].ready)
        fleet.epochs.add({b"a" * 16: 1})
        await until(lambda: stub.replicas[1].epochs == {b"a" * 16: 1})
        await holds(lambda: not stub.replicas[0].epochs, 0.1)


def test_what_is_told_later_is_bounded_by_number_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raised_epochs, "IDS_MAX", 3)
    clock = [0.0]
    epochs = RaisedEpochs(lambda: clock[0])
    for number in range(5):
        epochs.add({bytes([number]): 1})
    assert list(epochs._epochs) == [bytes([2]), bytes([3]), bytes([4])]
    clock[0] = raised_epochs.KEPT_S + 1
    epochs.add({b"x": 3})
    epochs.add({b"x": 2})
    assert list(epochs._epochs.items()) == [(b"x", (3, clock[0]))]


@looped
async def test_an_operators_purge_reaches_replicas_without_a_call_of_the_account(tmp_path: Path) -> None:
    async with served_admin(tmp_path) as house:
        await house.gateway.run(prompt="hello", max_tokens=1)
        (submit,) = house.gateway.fleet.submits
        (replica,) = house.gateway.fleet.replicas
        assert (await house.ask("POST", f"{house.account}/cache/purge")).status == 200
        await until(lambda: replica.epochs == {submit.scope.account: 1})
