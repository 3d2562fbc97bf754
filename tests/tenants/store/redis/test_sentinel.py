import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from msgspec.structs import replace

from tenants.open import open_store
from tenants.records.accounts import Account
from tenants.records.holds import Granted
from tenants.records.limits import Limits
from tenants.store.protocol import StoreUnavailable
from tenants.store.redis import sentinel as module
from tests.support.certificates import write_certificate
from tests.support.fake_sentinel import FakeSentinel
from tests.support.redis_server import free_port
from tests.support.relay import relay
from tests.tenants.store.redis.test_store import ANN, hold

pytestmark = pytest.mark.anyio


@pytest.fixture
def redis_port(empty_redis_url: str) -> int:
    port = urlsplit(empty_redis_url).port
    assert port is not None
    return port


async def ping(url: str) -> None:
    store = open_store(url)
    try:
        await store.ping()
    finally:
        await store.close()


async def three(stack: AsyncExitStack, *sentinels: FakeSentinel) -> str:
    """The URL of these."""
    for each in sentinels:
        await stack.enter_async_context(each.listening())
    return "sentinel://" + ",".join(f"127.0.0.1:{each.port}" for each in sentinels) + "/main"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


async def test_the_newest_configuration_that_a_majority_knows_counts(stack: AsyncExitStack, redis_port: int) -> None:
    stale = free_port()
    fresh = FakeSentinel(redis_port, epoch=7)
    await ping(await three(stack, FakeSentinel(stale, epoch=3), fresh, FakeSentinel(stale, epoch=3, silent=True)))


async def test_two_of_three_sentinels_may_be_gone(
    stack: AsyncExitStack, redis_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SENTINEL_S", 0.2)
    url = await three(stack, FakeSentinel(redis_port), FakeSentinel(redis_port, silent=True))
    await ping(url.replace("sentinel://", f"sentinel://127.0.0.1:{free_port()},"))


async def test_a_name_that_no_sentinel_knows_is_an_error_that_says_so(stack: AsyncExitStack, redis_port: int) -> None:
    url = await three(stack, *(FakeSentinel(redis_port, name=None) for _ in range(3)))
    with pytest.raises(StoreUnavailable, match=r"know no primary 'main': correct the name in \[store\] url"):
        await ping(url)


async def test_sentinels_that_are_all_gone_are_an_error_that_names_them() -> None:
    port = free_port()
    with pytest.raises(StoreUnavailable, match=rf"none of 127.0.0.1:{port} answers: .*see that they run"):
        await ping(f"sentinel://127.0.0.1:{port}/main")


async def test_a_server_that_is_no_primary_is_never_written_to(
    stack: AsyncExitStack, redis_port: int, empty_redis_url: str
) -> None:
    """A Sentinel may name a server in the moment in which it is made a replica."""
    url = await three(stack, FakeSentinel(redis_port))
    with redis.Redis.from_url(empty_redis_url) as client:
        client.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]
        try:
            with pytest.raises(StoreUnavailable, match=r"READONLY .* follows 127.0.0.1:1"):
                await ping(url)
        finally:
            client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]


async def test_a_primary_that_became_a_replica_is_left_for_the_new_one(
    stack: AsyncExitStack, redis_port: int, empty_redis_url: str
) -> None:
    """Also where the connection to it stays, as behind a proxy: the answer READONLY is enough."""
    sentinel = FakeSentinel(free_port())
    store = open_store(await three(stack, sentinel))
    with relay(redis_port) as (other_port, _), redis.Redis.from_url(empty_redis_url) as client:
        sentinel.primary_port = other_port
        await store.ping()
        client.replicaof("127.0.0.1", "1")  # type: ignore[no-untyped-call]
        try:
            with pytest.raises(StoreUnavailable, match="this is a replica"):
                await store.ping()
        finally:
            client.replicaof("NO", "ONE")  # type: ignore[no-untyped-call]
        sentinel.primary_port, sentinel.epoch = redis_port, 2
        await store.ping()
        connected = {str(each["addr"]) for each in client.client_list()}
        assert connected
    await store.close()


async def test_a_primary_that_hangs_is_left_as_soon_as_the_sentinels_name_another(
    stack: AsyncExitStack, redis_port: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        sentinel = FakeSentinel(hanging.getsockname()[1])
        store = open_store(await three(stack, sentinel))
        asking = asyncio.create_task(store.ping())
        kept, _ = await asyncio.to_thread(hanging.accept)
        sentinel.primary_port, sentinel.epoch = redis_port, 2
        await asking
        kept.close()
        await store.close()


async def test_sentinels_and_primary_are_reached_over_tls_each_with_its_own_login(
    stack: AsyncExitStack, redis_port: int, empty_redis_url: str, tmp_path: Path
) -> None:
    files = write_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["certificate"], files["key"])
    with relay(redis_port, tls=files) as (port, _), redis.Redis.from_url(empty_redis_url) as client:
        client.acl_setuser("ann", enabled=True, passwords=["+p@ss"], keys=["*"], commands=["+@all"])
        sentinel = FakeSentinel(port, login=("eve", "s&t"))
        await stack.enter_async_context(sentinel.listening(context))
        logins = ("ann:p%40ss", "sentinel_username=eve&sentinel_password=s%26t")
        url = f"sentinels://{logins[0]}@127.0.0.1:{sentinel.port}/main?{logins[1]}"
        try:
            await ping(f"{url}&ssl_ca_certs={files['certificate']}")
            assert set(sentinel.logins) == {("eve", "s&t")}
            with pytest.raises(StoreUnavailable, match=r"CERTIFICATE_VERIFY_FAILED.*not signed by \[store\] ca"):
                await ping(url)
            with pytest.raises(StoreUnavailable, match=r"the password in \[store\] url is wrong"):
                await ping(f"{url}&ssl_ca_certs={files['certificate']}".replace("p%40ss", "other"))
            with pytest.raises(StoreUnavailable, match=r"the password in \[store\] url is wrong"):
                await ping(f"{url}&ssl_ca_certs={files['certificate']}".replace("s%26t", "other"))
        finally:
            client.acl_deluser("ann")


async def test_the_rights_that_the_page_names_are_enough(redis_port: int, empty_redis_url: str) -> None:
    page = (Path(__file__).parents[4] / "docs" / "store.md").read_text()
    named = re.search(r"`(~hearth:\* [^`]+)`", page)
    assert named is not None
    with redis.Redis.from_url(empty_redis_url) as client:
        client.execute_command("ACL", "SETUSER", "ann", "on", ">pass", *named[1].split())
        store = open_store(f"redis://ann:pass@127.0.0.1:{redis_port}/0")
        try:
            await store.ping()
            await store.accounts.add(Account(ANN, "ann", Limits(), 1))
            granted = await store.quotas.reserve(replace(hold("r"), strict=True))
            assert isinstance(granted, Granted)
            await store.quotas.settle([replace(hold("r").record, day=granted.day)])
            (await store.quotas.reconcile(ANN, granted.day)).check()
            assert await store.advice() is not None
            await store.quotas.remove(ANN, keep_usage=False)
            await store.accounts.remove(ANN)
        finally:
            await store.close()
            client.acl_deluser("ann")


async def test_a_store_over_tls_is_reached_and_no_other(redis_port: int, tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    with relay(redis_port, tls=files) as (port, _):
        await ping(f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={files['certificate']}")
        with pytest.raises(StoreUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await ping(f"rediss://127.0.0.1:{port}/0")
