"""Many hosts that are dialled at once, over real sockets: how many handshakes are under way, and whom they hold up."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.cluster import connection, handshakes
from gateway.cluster.connection import HostConnector, MachineConnection
from gateway.cluster.handshakes import HandshakePlaces
from gateway.identity.host_identity import HostRole
from tests.support.hosts import host_maker
from tests.support.waiting import holds, in_fake_time, turns, until

pytestmark = pytest.mark.anyio


@in_fake_time
async def test_places_are_given_in_order_and_no_more_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "PLACES", 2)
    places, began, end = HandshakePlaces(), list[int](), [asyncio.Event() for _ in range(4)]

    async def shake_hands(number: int) -> None:
        async with places.take():
            began.append(number)
            await end[number].wait()

    tasks = [asyncio.create_task(shake_hands(number)) for number in range(4)]
    await turns(5)
    assert (began, places.crowded) == ([0, 1], True)
    tasks[2].cancel()  # who waits may leave
    end[1].set()
    await turns(5)
    assert began == [0, 1, 3]
    for each in end:
        each.set()
    await asyncio.wait(tasks)
    assert not places.crowded


@in_fake_time
async def test_a_peer_that_never_answers_keeps_its_place_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "PLACES", 1)
    places, loop = HandshakePlaces(), asyncio.get_running_loop()

    async def wait_in_vain() -> None:
        async with places.take():
            await asyncio.Event().wait()

    silent = asyncio.create_task(wait_in_vain())
    await turns()
    async with asyncio.timeout(2 * handshakes.PLACE_S), places.take():
        assert loop.time() == pytest.approx(handshakes.PLACE_S)
        silent.cancel()
        await asyncio.wait([silent])
        assert places.crowded, "its place was given back once, not twice"
    assert not places.crowded


class SilentHosts(asyncio.Protocol):
    """Hosts whose kernel takes connections, and that say nothing: what was `said` to each, in bytes."""

    def __init__(self, said: dict[int, int]) -> None:
        self._said, self._number = said, len(said)
        said[self._number] = 0

    def data_received(self, data: bytes) -> None:
        self._said[self._number] += len(data)


@contextlib.asynccontextmanager
async def silent_hosts(said: dict[int, int]) -> AsyncIterator[str]:
    server = await asyncio.get_running_loop().create_server(lambda: SilentHosts(said), "127.0.0.1", 0)
    yield f"tls:m1@127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


def new_machine() -> MachineConnection:
    return MachineConnection(lambda *_: None)


async def test_of_many_dials_a_few_begin_at_once_and_each_has_its_time_from_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "PLACES", 3)
    monkeypatch.setattr(handshakes, "PLACE_S", 30.0)
    monkeypatch.setattr(connection, "CONNECT_S", 1.0)
    gateway, said = host_maker(tmp_path).host(HostRole.GATEWAY, "gw1"), dict[int, int]()
    connector = HostConnector(lambda: gateway.credentials().client)
    async with silent_hosts(said) as address:
        dials = [asyncio.create_task(connector(address, new_machine)) for _ in range(9)]
        await until(lambda: sum(map(bool, said.values())) == 3, 10, "three begin")
        await holds(lambda: sum(map(bool, said.values())) == 3, 0.3)
        await until(lambda: sum(map(bool, said.values())) == 9, 10, "all others have their turn, after theirs")
        ended = await asyncio.gather(*dials, return_exceptions=True)
    assert [type(each) for each in ended] == [TimeoutError] * 9


async def test_where_others_wait_a_host_that_is_gone_waits_for_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "PLACES", 1)
    monkeypatch.setattr(handshakes, "PLACE_S", 30.0)
    monkeypatch.setattr(connection, "CONNECT_S", 30.0)
    gateway, said = host_maker(tmp_path).host(HostRole.GATEWAY, "gw1"), dict[int, int]()
    connector = HostConnector(lambda: gateway.credentials().client)
    async with silent_hosts(said) as address:
        silent = asyncio.create_task(connector(address, new_machine))
        await until(lambda: sum(said.values()), 10, "it has the only place")
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionRefusedError):
                await connector("tls:m2@127.0.0.1:1", new_machine)
        assert not silent.done()
        silent.cancel()
        await asyncio.wait([silent])
