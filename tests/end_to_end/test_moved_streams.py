"""Streams whose replica drains while another one takes their KV: what their clients receive is what they would have
received without that, and the prompt is computed once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_resumed_streams import CASES, STORY, relays, shape, timeless
from tests.support.cut_replica import CutReplica, real_replicas
from tests.support.served_gateway import Served, looped, served
from tests.support.waiting import until


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    with real_replicas(tmp_path_factory.mktemp("moving"), 2, handover_bytes=64 << 20) as addresses:
        yield addresses


async def drained(gateway: Served, after: int, **asked: Any) -> Any:
    """The call's answer, where its replica drains after so many tokens."""
    for replica in gateway.fleet.replicas:
        assert isinstance(replica, CutReplica)
        replica.drain_in, replica.moved, replica.stayed = after, 0, 0
    answer = await gateway.chat(**asked)
    first, second = gateway.fleet.replicas
    assert isinstance(first, CutReplica)
    assert isinstance(second, CutReplica)
    assert first.moved + second.moved > 0, "nothing moved"
    assert first.stayed + second.stayed == 0
    for replica in (first, second):
        replica.drain_in = None
    return answer


@pytest.mark.parametrize("name", CASES)
def test_a_stream_of_a_replica_that_drains_goes_on_with_its_kv(name: str, addresses: list[str], tmp_path: Path) -> None:
    asked = {"messages": STORY, **CASES[name]}

    @looped
    async def call() -> None:
        async with served(tmp_path / "calm", relays=relays(tmp_path, addresses)) as gateway:
            calm = await gateway.chat(**asked)
            assert calm.status == 200, calm.content
            streamed = await gateway.chat(**asked, stream=True)
        for number, stream in enumerate((False, True)):
            folder = tmp_path / str(number)
            folder.mkdir()
            async with served(folder / "served", relays=relays(folder, addresses)) as gateway:
                answer = await drained(gateway, 6, **asked, stream=stream)
                submits = [submit for replica in gateway.fleet.replicas for submit in replica.submits if submit.given]
                assert [given.handover for submit in submits for given in submit.given if given.handover], "no key"
                if stream:
                    assert shape(answer.events) == shape(streamed.events)
                else:
                    assert timeless(answer.json) == timeless(calm.json)
                    usage = answer.json["usage"]
                    assert usage["completion_tokens"] == calm.json["usage"]["completion_tokens"]
                await gateway.settled()
                assert len(await gateway.records()) == 1, "it was charged once"

    call()


def test_a_stream_of_two_ranks_that_drain_goes_on_at_one_with_its_kv(tmp_path: Path) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path / "served", relays=relays(tmp_path, addresses)) as gateway:
            of_two, of_one = gateway.fleet.replicas
            assert isinstance(of_two, CutReplica)
            assert isinstance(of_one, CutReplica)
            for number in range(12):  # each goes to either, as its prompt says
                story = {"role": "user", "content": f"Tell me story {number}."}
                asked = {"messages": [*STORY[:1], story], "temperature": 0, "max_tokens": 20, "ignore_eos": True}
                answer = await drained(gateway, 6, **asked)
                if of_two.moved and not of_one.moved:
                    break
            assert of_two.moved, "no call went to the two ranks"
            assert of_one.submits[-1].given[0].handover, "no key"
            calm = await gateway.chat(**asked)
            assert timeless(answer.json) == timeless(calm.json)
            await gateway.settled()

    with real_replicas(tmp_path, 2, ranks=(2, 1), parts=2, dtype="float32", handover_bytes=64 << 20) as addresses:
        call()


def test_a_stream_whose_gpus_drain_goes_on_with_its_kv_on_another_number_where_no_replica_has_as_many(
    tmp_path: Path,
) -> None:
    @looped
    async def call() -> None:
        async with served(tmp_path / "served", relays=relays(tmp_path, addresses)) as gateway:
            fleet = gateway.app._serving.context.fleet
            await until(lambda: any(replica.differs for replica in fleet.replicas()))
            (unlike,) = [replica.state.address for replica in fleet.replicas() if replica.differs]
            given = {"messages": STORY, "temperature": 0, "max_tokens": 20, "ignore_eos": True}
            answer = await drained(gateway, 6, **given)
            assert answer.json["usage"]["completion_tokens"] == 20
            (heir,) = [replica for replica in gateway.fleet.replicas if replica.state.address == unlike]
            assert heir.submits[-1].given[0].handover, "no key"
            await gateway.settled()

    with real_replicas(tmp_path, 2, ranks=(2, 1), dtype="float32", handover_bytes=64 << 20) as addresses:
        call()
