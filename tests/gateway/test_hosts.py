"""A gateway among the hosts of its cluster: whose word counts, and what it does so that others and it stay members."""

import asyncio
import contextlib
import inspect
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from engine.host import agent
from gateway import certificate_keeper
from gateway.certificate_keeper import CertificateKeeper
from gateway.hosts import GatewayHosts, open_hosts
from gateway.identity.authority import CERTIFICATE_S, found_authority, key_digest, open_authority
from gateway.identity.host_identity import HostRole
from gateway.identity.settings import ClusterConfig
from gateway.joining.client import JoinRefused, NoGatewayAnswers, ask_gateways
from gateway.joining.messages import JoinAnswer, NewsQuestion
from gateway.members.own_machine import LOCK
from gateway.settings.config import Config, SettingsError
from gateway.settings.machine import MachineConfig
from gateway.settings.server import ServerConfig
from gateway.tenancy import Tenancy, open_tenancy
from tenants.records.cluster import ClusterMember, JoinToken
from tests.support.hosts import SECRET, HostMaker, host_maker
from tests.support.redis_server import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def settings(folder: Path, **cluster: str) -> Config:
    return Config(
        state_folder=str(folder / "state"),
        cluster=ClusterConfig(join_listen=f"127.0.0.1:{free_port()}", **cluster),
    )


@pytest.fixture
async def tenancy(tmp_path: Path) -> AsyncIterator[Tenancy]:
    made = open_tenancy(settings(tmp_path), SECRET)
    yield made
    await made.close()


async def founded(tenancy: Tenancy, config: Config, folder: Path) -> HostMaker:
    """A cluster in the store of which this host is the gateway gw1, its certificate older than it may get."""
    record = found_authority("test", tenancy.secret, time.time())
    await tenancy.store.cluster.found(record)
    hosts, now = HostMaker(folder / "hosts", open_authority(record, tenancy.secret)), int(time.time())
    key = ec.generate_private_key(ec.SECP256R1())
    hosts.host(HostRole.GATEWAY, "gw1", region="eu-west", key=key, age_s=0.7 * CERTIFICATE_S)
    shutil.copytree(hosts.folder / "gw1", config.cluster.paths(config.state).key.parent)
    port = config.cluster.join_listen.rpartition(":")[2]
    await admit(tenancy, "gateway", "gw1", key, f"10.1.1.1:{port}", now)
    return hosts


async def admit(
    tenancy: Tenancy, role: str, name: str, key: ec.EllipticCurvePrivateKey, address: str, now: int
) -> ClusterMember:
    await tenancy.store.cluster.add_token(JoinToken("t", b"", role, "eu-west", "", "", 99, now + 60))
    digest = key_digest(key.public_key())
    member = ClusterMember(name, role, "eu-west", "", digest, address, now, now + CERTIFICATE_S)
    await tenancy.store.cluster.admit("t", member, now)
    return member


@contextlib.asynccontextmanager
async def running(hosts: GatewayHosts) -> AsyncIterator[set[str]]:
    """The addresses of the machines that the gateway knows, while it runs."""
    fleet = hosts.fleet(lambda model, seconds: None)
    tasks = [asyncio.create_task(job()) for job in (fleet.run, lambda: hosts.follow(fleet), *hosts.jobs.values())]
    known: set[str] = set()

    async def look() -> None:
        while True:
            known.clear()
            known.update(fleet.links.addresses)
            await turn()

    tasks.append(asyncio.create_task(look()))
    try:
        yield known
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def turn() -> None:
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, done.set)
    await done.wait()


async def test_a_host_that_joined_none_knows_its_own_machine_and_its_file_s_region(
    tenancy: Tenancy, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    hosts = open_hosts(config, tenancy)
    assert not hosts.jobs
    assert hosts.placed(Config(server=ServerConfig(region="eu-west"))).server.region == "eu-west"
    async with running(hosts) as known:
        await until(lambda: known == {config.machine_address}, 10, "its own machine is known")


async def test_the_certificate_says_the_region_whatever_the_file_says(
    tenancy: Tenancy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(tmp_path)
    await founded(tenancy, config, tmp_path)
    hosts = open_hosts(config, tenancy)
    assert hosts.placed(Config(server=ServerConfig(region="us-east"))).server.region == "eu-west"
    assert "us-east" in caplog.text
    assert hosts.placed(Config(server=ServerConfig())).server.region == "eu-west"


async def test_machines_that_joined_are_known_beside_those_of_the_file_and_removed_ones_are_not(
    tenancy: Tenancy, tmp_path: Path
) -> None:
    config = settings(tmp_path)
    await founded(tenancy, config, tmp_path)
    own = f"unix:{tmp_path / 'own.sock'}"
    with_own = Config(state_folder=config.state_folder, cluster=config.cluster, machine=MachineConfig(addresses=[own]))
    now = int(time.time())
    for name in ("m1", "m2"):
        await admit(tenancy, "machine", name, ec.generate_private_key(ec.SECP256R1()), f"127.0.0.1:{free_port()}", now)
    async with running(open_hosts(with_own, tenancy)) as known:
        await until(lambda: len(known) == 3 and own in known, 10, "all three are known")
        await tenancy.store.cluster.remove("machine/m1")
        await until(lambda: len(known) == 2, 5, "the removed one is gone within 5 s")
        assert not any("m1@" in address for address in known)


async def test_a_machine_beside_the_gateway_is_known_once_it_has_run(tenancy: Tenancy, tmp_path: Path) -> None:
    config = settings(tmp_path)
    await founded(tenancy, config, tmp_path)
    async with running(open_hosts(config, tenancy)) as known:
        await turn()
        assert known == set()
        config.run_folder.mkdir(parents=True, exist_ok=True)
        (config.run_folder / LOCK).touch()
        await until(lambda: known == {config.machine_address}, 10, "it is known")


def test_an_agent_makes_the_file_that_a_gateway_looks_for() -> None:
    assert f'"{LOCK}"' in inspect.getsource(agent)


async def test_a_gateway_renews_its_own_certificate_and_answers_members(tenancy: Tenancy, tmp_path: Path) -> None:
    config = settings(tmp_path)
    made = await founded(tenancy, config, tmp_path)
    key, now = ec.generate_private_key(ec.SECP256R1()), int(time.time())
    machine = made.host(HostRole.MACHINE, "m1", key=key)
    await admit(tenancy, "machine", "m1", key, "127.0.0.1:1", now)
    hosts = open_hosts(config, tenancy)
    assert hosts.files is not None
    before = hosts.files.credentials().expires_s
    async with running(hosts):
        await until(lambda: hosts.files and hosts.files.credentials().expires_s > before, 30, "it is renewed")
        assert hosts.files.credentials().identity.region == "eu-west"
        members = {member.id: member for member in await tenancy.store.cluster.members()}
        assert members["gateway/gw1"].address.startswith("10.1.1.1:")

        async def asked() -> JoinAnswer | None:
            with contextlib.suppress(NoGatewayAnswers):
                question = NewsQuestion(":8791")
                return (await ask_gateways([config.cluster.join_listen], machine.credentials(), question))[0]
            return None

        answer = await until(asked, 10, "the gateway answers its members")
        assert answer.gateways == [members["gateway/gw1"].address]
        await tenancy.store.cluster.remove("machine/m1")

        async def refused() -> bool:
            try:
                await asked()
            except JoinRefused as error:
                return "was removed" in str(error)
            return False

        await until(refused, 5, "the removed machine is told so within 5 s")


async def test_a_machine_s_certificate_is_not_taken_for_a_gateway(tenancy: Tenancy, tmp_path: Path) -> None:
    config = settings(tmp_path)
    hosts = await founded(tenancy, config, tmp_path)
    paths = config.cluster.paths(config.state)
    hosts.host(HostRole.MACHINE, "m1")
    shutil.rmtree(paths.key.parent)
    shutil.copytree(hosts.folder / "m1", paths.key.parent)
    with pytest.raises(SettingsError, match="a gateway needs one of role gateway"):
        open_hosts(config, tenancy)


async def test_files_of_ones_own_pki_are_used_and_no_host_joins_there(tenancy: Tenancy, tmp_path: Path) -> None:
    hosts = await founded(tenancy, settings(tmp_path), tmp_path)
    hosts.host(HostRole.GATEWAY, "gw7", region="us-east")
    paths = hosts.paths("gw7")
    own = {"certificate": str(paths.certificate), "key": str(paths.key), "authority": str(paths.authority)}
    found = open_hosts(settings(tmp_path, **own), tenancy)
    assert not found.jobs
    assert found.placed(Config(server=ServerConfig())).server.region == "us-east"
    with pytest.raises(SettingsError, match="is for hosts that joined"):
        open_hosts(settings(tmp_path, **own, members="store"), tenancy)


async def test_a_disk_that_is_full_as_a_certificate_is_renewed_ends_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(certificate_keeper, "write_identity", full)
    nothing: Any = None
    files = host_maker(tmp_path).host(HostRole.GATEWAY, "gw")
    CertificateKeeper(nothing, nothing, files, nothing, nothing)._take(b"certificate", "")
    assert "certificate cannot be kept: [Errno 28] No space left on device" in caplog.text
