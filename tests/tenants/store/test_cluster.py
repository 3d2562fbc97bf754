"""The contract of ClusterStore, on SQLite and on a real Redis."""

import asyncio

import pytest
from msgspec import structs

from tenants.records.catalogue import (
    CATALOGUE_BYTES_MAX,
    MODELS_MAX,
    CatalogueFile,
    CatalogueModel,
    CatalogueTooLarge,
    ClusterCatalogue,
    HostCatalogue,
    ModelProgress,
)
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinOutcome, JoinToken
from tenants.store.protocol import Store

pytestmark = pytest.mark.anyio
NOW = 1_000
TOKEN = JoinToken("t1", b"digest", "machine", "eu-west", "fra1", "", 1, NOW + 60)
MEMBER = ClusterMember("m1", "machine", "eu-west", "fra1", "key-1", "10.0.0.1:8791", NOW, NOW + 86_400)


def other(number: int) -> ClusterMember:
    return structs.replace(MEMBER, name=f"m{number}", key=f"key-{number}")


async def test_a_cluster_is_founded_once(store: Store) -> None:
    first = ClusterAuthority("one", b"certificate", b"sealed")
    assert await store.cluster.authority() is None
    assert await store.cluster.found(first)
    assert not await store.cluster.found(structs.replace(first, cluster="two"))
    assert await store.cluster.authority() == first


async def test_a_token_with_one_use_admits_one_of_a_hundred(store: Store) -> None:
    await store.cluster.add_token(TOKEN)
    assert await store.cluster.token("t1") == TOKEN
    outcomes = await asyncio.gather(*(store.cluster.admit("t1", other(number), NOW) for number in range(100)))
    assert sorted(outcomes) == [JoinOutcome.ADMITTED, *[JoinOutcome.USED_TOKEN] * 99]
    assert len(await store.cluster.members()) == 1


async def test_a_member_that_asks_again_takes_no_further_use(store: Store) -> None:
    await store.cluster.add_token(structs.replace(TOKEN, uses=2))
    assert await store.cluster.admit("t1", MEMBER, NOW) is JoinOutcome.ADMITTED
    assert await store.cluster.admit("t1", MEMBER, NOW) is JoinOutcome.ADMITTED
    assert await store.cluster.admit("t1", other(2), NOW) is JoinOutcome.ADMITTED
    assert await store.cluster.members() == [MEMBER, other(2)]


async def test_a_name_is_taken_for_as_long_as_its_certificate_holds(store: Store) -> None:
    await store.cluster.add_token(structs.replace(TOKEN, uses=9))
    await store.cluster.admit("t1", MEMBER, NOW)
    second = structs.replace(MEMBER, key="key-2")
    assert await store.cluster.admit("t1", second, NOW) is JoinOutcome.NAME_TAKEN
    as_gateway = structs.replace(second, role="gateway")
    assert await store.cluster.admit("t1", as_gateway, NOW) is JoinOutcome.ADMITTED
    assert await store.cluster.admit("t1", second, MEMBER.expires_at) is JoinOutcome.ADMITTED
    assert await store.cluster.members() == [as_gateway, second]


async def test_an_unknown_token_admits_nobody(store: Store) -> None:
    assert await store.cluster.admit("t1", MEMBER, NOW) is JoinOutcome.UNKNOWN_TOKEN
    assert await store.cluster.token("t1") is None
    assert await store.cluster.members() == []


async def test_a_removed_key_is_known_until_its_certificate_expires_and_joins_no_more(store: Store) -> None:
    await store.cluster.add_token(structs.replace(TOKEN, uses=9))
    await store.cluster.admit("t1", MEMBER, NOW)
    assert await store.cluster.remove(MEMBER.id)
    assert not await store.cluster.remove(MEMBER.id)
    assert await store.cluster.removed_keys(NOW) == ["key-1"]
    assert await store.cluster.removed_keys(MEMBER.expires_at) == []
    assert await store.cluster.admit("t1", MEMBER, NOW) is JoinOutcome.REMOVED_KEY
    assert not await store.cluster.renew(MEMBER)
    assert await store.cluster.admit("t1", structs.replace(MEMBER, key="key-9"), NOW) is JoinOutcome.ADMITTED


async def test_only_the_member_with_its_key_is_renewed(store: Store) -> None:
    await store.cluster.add_token(TOKEN)
    await store.cluster.admit("t1", MEMBER, NOW)
    later = structs.replace(MEMBER, expires_at=MEMBER.expires_at + 9)
    assert await store.cluster.renew(later)
    assert not await store.cluster.renew(structs.replace(later, key="key-2"))
    assert await store.cluster.members() == [later]


def revised(number: int, edition: str, *names: str) -> ClusterCatalogue:
    models = [CatalogueModel(name, {"replicas": 2}, [CatalogueFile("config.json", 2, "ab" * 32)]) for name in names]
    return ClusterCatalogue(f"{number}-{edition}", models)


async def test_of_changes_to_one_revision_of_the_catalogue_one_is_taken(store: Store) -> None:
    assert await store.cluster.catalogue() == ClusterCatalogue()
    changes = [revised(1, f"edition{number}", f"model{number}") for number in range(20)]
    taken = await asyncio.gather(*(store.cluster.put_catalogue(change, "") for change in changes))
    assert sum(taken) == 1
    first = changes[taken.index(True)]
    assert await store.cluster.catalogue() == first
    assert await store.cluster.catalogue(first.revision) is None
    assert not await store.cluster.put_catalogue(revised(2, "late"), "")
    assert await store.cluster.put_catalogue(revised(2, "b", "one", "two"), first.revision)
    assert await store.cluster.catalogue(first.revision) == revised(2, "b", "one", "two")


async def test_a_catalogue_over_a_limit_is_refused_and_changes_nothing(store: Store) -> None:
    many = revised(1, "a", *(f"model{number}" for number in range(MODELS_MAX + 1)))
    wide = ClusterCatalogue("1-a", [CatalogueModel("one", {"description": "x" * CATALOGUE_BYTES_MAX}, [])])
    for catalogue, words in ((many, f"{MODELS_MAX} models at the most"), (wide, f"{CATALOGUE_BYTES_MAX} at the most")):
        with pytest.raises(CatalogueTooLarge, match=words):
            await store.cluster.put_catalogue(catalogue, "")
    assert await store.cluster.catalogue() == ClusterCatalogue()
    assert await store.cluster.put_catalogue(structs.replace(many, models=many.models[:MODELS_MAX]), "")


async def test_what_a_host_says_of_the_catalogue_is_kept_until_it_is_removed(store: Store) -> None:
    await store.cluster.add_token(structs.replace(TOKEN, uses=9))
    report = HostCatalogue(MEMBER.id, "1-a", [ModelProgress("one", "fetching", 3, 9, "the disk is full")], NOW)
    await store.cluster.report_catalogue(report)
    assert await store.cluster.catalogue_reports() == [], "it is no member"
    await store.cluster.admit("t1", MEMBER, NOW)
    await store.cluster.admit("t1", other(2), NOW)
    second = structs.replace(report, member_id=other(2).id)
    await store.cluster.report_catalogue(second)
    await store.cluster.report_catalogue(structs.replace(report, revision="0-0"))
    await store.cluster.report_catalogue(report)
    assert await store.cluster.catalogue_reports() == [report, second]
    assert await store.cluster.remove(MEMBER.id)
    await store.cluster.report_catalogue(report)
    assert await store.cluster.catalogue_reports() == [second]


async def test_a_member_that_the_store_lost_is_restored_and_a_removed_one_is_not(store: Store) -> None:
    assert not await store.cluster.restore(MEMBER, NOW), "a store without a cluster knows nobody"
    await store.cluster.found(ClusterAuthority("one", b"certificate", b"sealed"))
    assert await store.cluster.restore(MEMBER, NOW)
    assert await store.cluster.members() == [MEMBER]
    assert not await store.cluster.restore(MEMBER, NOW), "it is there"
    second = structs.replace(MEMBER, key="key-2")
    assert not await store.cluster.restore(second, NOW), "the name is another's"
    assert await store.cluster.restore(second, MEMBER.expires_at)
    await store.cluster.remove(MEMBER.id)
    assert not await store.cluster.restore(second, NOW), "its key was removed"
    assert await store.cluster.members() == []
