"""What Kubernetes may do to those that watch it."""

from pathlib import Path

import pytest

from gateway.members.kubernetes import KubernetesApi, KubernetesMembers, pod_api
from tests.gateway.members.test_contract import FIRST, LOOK_S, SECOND, addresses, followed
from tests.support.kubernetes_api import SERVICE, FakeKubernetes, endpoint_slice
from tests.support.waiting import holds, until

pytestmark = pytest.mark.anyio


def members_of(api: FakeKubernetes) -> KubernetesMembers:
    return KubernetesMembers(KubernetesApi(api.url, None, True), "ml", SERVICE, (LOOK_S, LOOK_S))


async def test_old_and_doubled_events_change_nothing() -> None:
    async with FakeKubernetes().serving() as api:
        api.put("one", FIRST)
        async with followed(members_of(api)) as told:
            await until(lambda: api.watches, 10, "it watches")
            api.put("one", SECOND)
            api.push({"type": "MODIFIED", "object": api.slices["one"]})
            api.push({"type": "MODIFIED", "object": endpoint_slice("one", 7, FIRST)})
            api.push({"type": "DELETED", "object": endpoint_slice("one", 8, {})})
            api.push({"type": "ADDED", "object": endpoint_slice("older", 9, FIRST)})
            api.put("two", {"m9": "10.0.0.9"})
            everything = {**SECOND, "m9": "10.0.0.9"}
            await until(lambda: told[-1] == addresses(everything), 10, "what came last is told")
            assert told == [addresses(FIRST), addresses(SECOND), addresses(everything)]


@pytest.mark.parametrize("in_stream", [False, True])
async def test_a_version_that_expired_is_listed_anew(in_stream: bool) -> None:
    async with FakeKubernetes(expires_in_stream=in_stream).serving() as api:
        api.put("one", FIRST)
        async with followed(members_of(api)) as told:
            await until(lambda: api.watches, 10, "it watches")
            api.cut()
            api.put("one", SECOND)
            api.oldest = api.version
            await until(lambda: told[-1] == addresses(SECOND), 10, "the list is told")
            assert api.lists >= 2


@pytest.mark.parametrize("watches", ["refused", "refused in the stream", "ended at once"])
async def test_watches_that_end_again_and_again_are_asked_for_with_pauses(watches: str) -> None:
    fake = FakeKubernetes(expires_in_stream=watches == "refused in the stream", ends_at_once=watches == "ended at once")
    async with fake.serving() as api:
        api.oldest = 0 if api.ends_at_once else api.version + 1
        pause_s = 0.05
        members = KubernetesMembers(KubernetesApi(api.url, None, True), "ml", SERVICE, (pause_s, 10.0))
        async with followed(members):
            await until(lambda: len(api.watched_from) >= 2, 10, "it watches again")
            await holds(lambda: len(api.watched_from) <= 8, 10 * pause_s)


async def test_a_bookmark_is_where_the_next_watch_begins() -> None:
    async with FakeKubernetes().serving() as api:
        api.put("one", FIRST)
        async with followed(members_of(api)) as told:
            await until(lambda: api.watches, 10, "it watches")
            api.bookmark()
            api.bookmark()
            marked = api.version
            api.put("two", {"m9": "10.0.0.9"})
            await until(lambda: len(told) == 2, 10, "what follows the bookmarks is told")
            api.cut()
            await until(lambda: len(api.watched_from) > 1 and api.watches, 10, "it watches again")
            assert api.watched_from[-1] == marked + 1
            assert api.lists == 1


async def test_an_endpoint_that_is_not_ready_is_a_machine_all_the_same() -> None:
    async with FakeKubernetes().serving() as api:
        api.put("one", FIRST)
        async with followed(members_of(api)) as told:
            await until(lambda: api.watches, 10, "it watches")
            api.put("one", FIRST, ready=False)
            await holds(lambda: told == [addresses(FIRST)], 5 * LOOK_S)


async def test_a_deleted_slice_takes_its_machines_with_it() -> None:
    async with FakeKubernetes().serving() as api:
        api.put("one", FIRST)
        api.put("two", SECOND)
        async with followed(members_of(api)) as told:
            await until(lambda: api.watches, 10, "it watches")
            api.delete("one")
            await until(lambda: told[-1] == addresses(SECOND), 10, "the rest is told")


def test_outside_a_pod_the_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST"):
        pod_api({}, tmp_path)
