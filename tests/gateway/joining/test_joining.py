"""Joining over real sockets: a gateway's listener, and hosts that ask it."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import structs

from gateway.identity import tls_door
from gateway.identity.authority import CERTIFICATE_S, SKEW_S, authority_digest, key_digest, signing_request
from gateway.identity.files import HostFiles, write_identity
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError
from gateway.joining.client import (
    JOIN_PORT,
    Joined,
    JoinRefused,
    NoGatewayAnswers,
    ask_gateways,
    join_cluster,
    split_address,
)
from gateway.joining.listener import JoinListener
from gateway.joining.messages import JoinAnswer, NewsQuestion, RenewRequest
from gateway.joining.service import JoinService
from gateway.joining.token_text import TokenText, new_token_text
from tenants.open import open_store
from tenants.records.cluster import ClusterAuthority, ClusterMember, JoinToken
from tenants.store.protocol import Store
from tests.support.hosts import SECRET, HostMaker, host_maker
from tests.support.redis_server import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@dataclass
class JoiningGateway:
    """A gateway where hosts join, its store, and what it would tell members."""

    store: Store
    hosts: HostMaker
    address: str
    removed: list[str] = field(default_factory=list)
    noted: list[tuple[str, str, str]] = field(default_factory=list)
    members: Sequence[ClusterMember] = ()
    now: float = field(default_factory=time.time)

    async def token(self, role: str = "machine", uses: int = 1, **changes: object) -> TokenText:
        text = new_token_text(authority_digest(self.hosts.authority.pem))
        token = JoinToken(text.id, text.digest, role, "eu-west", "fra1", "", uses, int(self.now) + 60)
        await self.store.cluster.add_token(structs.replace(token, **changes))
        return text

    async def join(
        self,
        token: TokenText,
        name: str,
        key: ec.EllipticCurvePrivateKey | None = None,
        role: HostRole = HostRole.MACHINE,
    ) -> Joined:
        return await join_cluster(self.address, token, role, name, ":8791", key or new_key())


async def nobody_asks(*_: object) -> JoinAnswer:
    raise AssertionError("no question comes so far")


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[JoiningGateway]:
    store = open_store(f"sqlite:{tmp_path / 'hearth.db'}")
    hosts, port = host_maker(tmp_path), free_port()
    made = JoiningGateway(store, hosts, f"127.0.0.1:{port}")

    async def note(actor: str, action: str, target: str, **_: object) -> None:
        made.noted.append((action, actor, target))

    service = JoinService(
        store.cluster, hosts.authority, SECRET, lambda: made.members, lambda: made.removed, lambda: made.now, note=note
    )
    listener = JoinListener(hosts.host(HostRole.GATEWAY, "gw1"), service.answer)
    running = asyncio.create_task(listener.run("127.0.0.1", port))

    async def listens() -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        return False

    await until(listens, 10, "the gateway listens")
    yield made
    running.cancel()
    await store.close()


def uri(certificate: bytes) -> str:
    extensions = x509.load_pem_x509_certificate(certificate).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.UniformResourceIdentifier)[0]


async def test_a_host_gets_a_certificate_that_names_what_its_token_says(gateway: JoiningGateway) -> None:
    joined = await gateway.join(await gateway.token(), "m7")
    assert uri(joined.certificate) == "spiffe://test/region/eu-west/site/fra1/machine/m7"
    assert joined.authority == gateway.hosts.authority.pem
    assert joined.secret is None
    (member,) = await gateway.store.cluster.members()
    assert (member.id, member.address) == ("machine/m7", "127.0.0.1:8791")
    ends = x509.load_pem_x509_certificate(joined.certificate).not_valid_after_utc.timestamp()
    assert ends == pytest.approx(gateway.now + CERTIFICATE_S, abs=2)


async def test_a_gateway_gets_the_server_s_secret(gateway: JoiningGateway) -> None:
    joined = await gateway.join(await gateway.token("gateway"), "gw2", role=HostRole.GATEWAY)
    assert joined.secret == SECRET
    assert uri(joined.certificate).endswith("/gateway/gw2")


async def test_a_hundred_hosts_with_one_token_of_one_use_are_one_member(gateway: JoiningGateway) -> None:
    token, key = await gateway.token(), [new_key() for _ in range(100)]
    outcomes = await asyncio.gather(
        *(gateway.join(token, f"m{number}", key[number]) for number in range(100)), return_exceptions=True
    )
    assert sum(isinstance(outcome, Joined) for outcome in outcomes) == 1
    assert all("used up" in str(outcome) for outcome in outcomes if not isinstance(outcome, Joined))
    assert len(await gateway.store.cluster.members()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expires_at": 1}, "expired"),
        ({"name": "m9"}, "is for a host named m9"),
        ({"digest": b""}, "no such token"),
    ],
)
async def test_a_token_opens_only_what_it_is_for(
    gateway: JoiningGateway, changes: dict[str, object], message: str
) -> None:
    token = await gateway.token(**changes)
    with pytest.raises(JoinRefused, match=message):
        await gateway.join(token, "m7")
    assert await gateway.store.cluster.members() == []


async def test_a_token_of_another_role_is_refused_and_stays_good(gateway: JoiningGateway) -> None:
    token = await gateway.token("gateway")
    with pytest.raises(JoinRefused, match="is for a gateway, and this host is to be a machine"):
        await gateway.join(token, "m7")
    assert (await gateway.join(token, "gw2", role=HostRole.GATEWAY)).secret == SECRET


async def test_half_open_connections_keep_no_host_from_joining(
    gateway: JoiningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_door, "STRANGERS_PER_ADDRESS_MAX", 20)
    host, port = gateway.address.split(":")
    flood = [socket.create_connection((host, int(port))) for _ in range(60)]
    assert uri((await gateway.join(await gateway.token(), "m7")).certificate).endswith("/machine/m7")
    for each in flood:
        each.close()


async def test_a_token_is_not_said_to_a_gateway_of_another_cluster(gateway: JoiningGateway) -> None:
    elsewhere = new_token_text("0" * 64)
    with pytest.raises(IdentityError, match="no gateway of the token's cluster"):
        await gateway.join(elsewhere, "m7")


async def test_two_hosts_cannot_have_one_name(gateway: JoiningGateway) -> None:
    await gateway.join(await gateway.token(), "m7")
    with pytest.raises(JoinRefused, match="give this host another --name"):
        await gateway.join(await gateway.token(), "m7")


async def test_a_gateway_whose_clock_is_ahead_gives_away_no_name_of_a_certificate_that_holds(
    gateway: JoiningGateway,
) -> None:
    await gateway.join(await gateway.token(), "m7")
    gateway.now += CERTIFICATE_S + 60  # the certificate still holds for whoever's clock is not an hour ahead
    with pytest.raises(JoinRefused, match="give this host another --name"):
        await gateway.join(await gateway.token(), "m7")
    gateway.now += SKEW_S
    assert uri((await gateway.join(await gateway.token(), "m7")).certificate).endswith("/machine/m7")


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
async def test_a_gateway_whose_clock_is_an_hour_off_admits_and_renews(gateway: JoiningGateway, ahead_s: float) -> None:
    gateway.now += ahead_s
    key = new_key()
    credentials = joined_host(gateway, await gateway.join(await gateway.token(), "m7", key), key, "m7").credentials()
    renewed, _ = await ask_gateways([gateway.address], credentials, RenewRequest(signing_request(key), ":8791"))
    ends = x509.load_pem_x509_certificate(renewed.certificate).not_valid_after_utc.timestamp()
    assert ends == pytest.approx(gateway.now + CERTIFICATE_S, abs=2)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("gw:8790", ("gw", 8790)),
        ("[::1]:9", ("::1", 9)),
        ("https://gw", ("gw", JOIN_PORT)),
        ("https://gw/", ("gw", JOIN_PORT)),
        ("https://[::1]", ("::1", JOIN_PORT)),
        ("https://[::1]:9/", ("::1", 9)),
        ("https://10.0.0.1:8800", ("10.0.0.1", 8800)),
    ],
)
async def test_where_a_host_joins_is_said_as_a_place_or_as_a_url(address: str, place: tuple[str, int]) -> None:
    assert split_address(address) == place


@pytest.mark.parametrize("address", ["gw", "http://gw:8790", "https://", "https://gw:1/join", "https://gw:port", ":1"])
async def test_what_is_no_place_to_join_at_is_refused_by_name(address: str) -> None:
    with pytest.raises(NoGatewayAnswers, match="where hosts join"):
        split_address(address)


async def test_a_host_joins_at_a_url(gateway: JoiningGateway) -> None:
    gateway.address = f"https://{gateway.address}/"
    assert uri((await gateway.join(await gateway.token(), "m7")).certificate).endswith("/machine/m7")


async def test_a_host_s_name_has_no_path_in_it(gateway: JoiningGateway) -> None:
    with pytest.raises(JoinRefused, match="no name of a host"):
        await gateway.join(await gateway.token(), "m7/gateway/gw1")


def joined_host(gateway: JoiningGateway, joined: Joined, key: ec.EllipticCurvePrivateKey, name: str) -> HostFiles:
    paths = gateway.hosts.paths(name)
    write_identity(paths, key, joined.certificate, joined.authority)
    return HostFiles(paths)


async def test_a_member_renews_its_certificate_for_as_long_as_it_is_one(gateway: JoiningGateway) -> None:
    key = new_key()
    credentials = joined_host(gateway, await gateway.join(await gateway.token(), "m7", key), key, "m7").credentials()
    gateway.now += CERTIFICATE_S / 2
    request = RenewRequest(signing_request(key), ":9000")
    renewed, _ = await ask_gateways([gateway.address], credentials, request)
    assert uri(renewed.certificate) == credentials.identity.uri
    (member,) = await gateway.store.cluster.members()
    assert (member.address, member.expires_at) == ("127.0.0.1:9000", int(gateway.now) + CERTIFICATE_S)
    await gateway.store.cluster.remove("machine/m7")
    with pytest.raises(JoinRefused, match="no member any more"):
        await ask_gateways([gateway.address], credentials, request)


async def test_a_member_that_the_store_has_lost_is_one_again_by_news_or_renewal(gateway: JoiningGateway) -> None:
    await gateway.store.cluster.found(ClusterAuthority("test", b"", b""))
    key = new_key()
    credentials = joined_host(gateway, await gateway.join(await gateway.token(), "m7", key), key, "m7").credentials()
    (before,) = await gateway.store.cluster.members()
    other = ClusterMember("gw1", "gateway", "", "", "key", gateway.address, 1, 1 << 40)
    for question in (NewsQuestion(":8791"), RenewRequest(signing_request(key), ":8791")):
        store: Any = gateway.store.cluster
        store._file.write("DELETE FROM cluster WHERE kind = 'member'")  # as a failover that lost it
        gateway.members = [other]
        await ask_gateways([gateway.address], credentials, question)
        (after,) = await gateway.store.cluster.members()
        assert structs.replace(after, joined_at=before.joined_at, expires_at=before.expires_at) == before
    assert [action for action, *_ in gateway.noted] == ["cluster.join", "cluster.restore", "cluster.restore"]
    await gateway.store.cluster.remove("machine/m7")
    await ask_gateways([gateway.address], credentials, NewsQuestion(":8791"))
    assert await gateway.store.cluster.members() == [], "one that was removed stays removed"


async def test_a_member_that_moved_is_reached_where_it_is(gateway: JoiningGateway) -> None:
    key = new_key()
    credentials = joined_host(gateway, await gateway.join(await gateway.token(), "m7", key), key, "m7").credentials()
    gateway.members = await gateway.store.cluster.members()
    await ask_gateways([gateway.address], credentials, NewsQuestion("10.9.9.9:8791"))
    (member,) = await gateway.store.cluster.members()
    assert member.address == "10.9.9.9:8791"


async def test_members_alone_renew_and_hear_news(gateway: JoiningGateway) -> None:
    key = new_key()
    credentials = joined_host(gateway, await gateway.join(await gateway.token(), "m7", key), key, "m7").credentials()
    gateway.removed = ["some-key"]
    alive = ClusterMember("gw1", "gateway", "", "", "key", gateway.address, 1, 1 << 40)
    gateway.members = [alive, structs.replace(alive, name="gw0", address="10.0.0.9:8790", expires_at=2)]
    news, answering = await ask_gateways(["127.0.0.1:1", gateway.address], credentials, NewsQuestion(":8791"))
    assert (news.removed, news.gateways) == (["some-key"], [gateway.address])
    assert answering == gateway.address
    other = RenewRequest(signing_request(new_key()), ":1")
    with pytest.raises(JoinRefused, match="of another key"):
        await ask_gateways([gateway.address], credentials, other)
    gateway.removed = [key_digest(key.public_key())]
    with pytest.raises(JoinRefused, match="was removed"):
        await ask_gateways([gateway.address], credentials, NewsQuestion(":8791"))


async def test_certificates_of_another_cluster_or_an_expired_one_are_refused(
    gateway: JoiningGateway, tmp_path: Path
) -> None:
    foreign = host_maker(tmp_path / "foreign").host(HostRole.MACHINE, "m7")
    expired = gateway.hosts.expired(HostRole.MACHINE, "m8")
    for host in (foreign, expired):
        with pytest.raises(NoGatewayAnswers):
            await ask_gateways([gateway.address], host.credentials(), NewsQuestion(":8791"))


async def test_a_machine_s_certificate_is_no_gateway_s(tmp_path: Path) -> None:
    hosts, port = host_maker(tmp_path), free_port()
    listener = JoinListener(hosts.host(HostRole.MACHINE, "m1"), nobody_asks)
    running = asyncio.create_task(listener.run("127.0.0.1", port))
    gateway = hosts.host(HostRole.GATEWAY, "gw1").credentials()

    async def answers() -> bool:
        with pytest.raises(NoGatewayAnswers) as raised:
            await ask_gateways([f"127.0.0.1:{port}"], gateway, NewsQuestion(":8791"))
        return "it is a machine, and no gateway" in str(raised.value)

    await until(answers, 10, "the machine was taken for what it is")
    running.cancel()


def test_an_identity_s_region_is_checked() -> None:
    with pytest.raises(IdentityError, match="no region"):
        HostIdentity("test", HostRole.MACHINE, "m1", "eu/west")


async def test_a_bug_in_an_answer_ends_that_connection_and_no_other(
    gateway: JoiningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    admit, bugs, token = gateway.store.cluster.admit, [KeyError("not foreseen")], await gateway.token()

    async def admitted(*arguments: Any) -> Any:
        if bugs:
            raise bugs.pop()
        return await admit(*arguments)

    monkeypatch.setattr(gateway.store.cluster, "admit", admitted)
    with pytest.raises(NoGatewayAnswers):
        await gateway.join(token, "m7")
    assert "JoinRequest of 127.0.0.1 was not answered" in caplog.text
    assert (await gateway.join(token, "m7")).certificate
