"""Stores, a clock that stands still, and ways to break a store for a while."""

import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import redis

from tenants.auth.accounts import AccountService
from tenants.auth.caller import Caller
from tenants.open import open_store
from tenants.records.limits import Limits
from tenants.store.protocol import Store
from tenants.store.redis import pipeline
from tenants.store.sqlite.store import SqliteStore
from tests.support.waiting import StoppedClock

DAY_S = 86_400
SECRET = b"the server's secret, 32 bytes up"


class DayClock(StoppedClock):
    """Noon of today, until a test moves it."""

    def __init__(self) -> None:
        super().__init__(float(int(time.time()) // DAY_S * DAY_S + DAY_S // 2))

    @property
    def day(self) -> int:
        return int(self.now_s) // DAY_S


@pytest.fixture(autouse=True)
def patient_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may answer later than one in service; redis/test_pipeline.py measures the real deadline."""
    monkeypatch.setattr(pipeline, "ANSWER_S", 0.3)


@pytest.fixture
def clock() -> DayClock:
    return DayClock()


@pytest.fixture
def empty_redis_url(redis_url: str) -> str:
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
        client.script_flush()
    return redis_url


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty store."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'hearth.db'}"
    url: str = request.getfixturevalue("empty_redis_url")
    return url


@pytest.fixture
async def store(store_url: str, clock: DayClock) -> AsyncIterator[Store]:
    opened = open_store(store_url, clock)
    yield opened
    await opened.close()


@pytest.fixture
def accounts(store: Store, clock: DayClock) -> AccountService:
    return AccountService(store, SECRET, clock)


@pytest.fixture
def new_caller(accounts: AccountService) -> "Callable[..., object]":
    """await new_caller(**limits) → the Caller of a new account with one ApiToken."""

    async def make(**limits: float) -> Caller:
        account = await accounts.create(f"ann {secrets.token_hex(4)}", Limits(**limits))  # type: ignore[arg-type]
        _, text = await accounts.mint(account.id, "laptop")
        return await accounts.verify(text)

    return make


Outage = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def outage(store: Store, store_url: str) -> Outage:
    """with outage(): the store cannot answer. SQLite's file is read-only then, Redis is frozen."""
    if isinstance(store, SqliteStore):
        return lambda: _read_only(store)
    return lambda: frozen(store_url)


@contextmanager
def _read_only(store: SqliteStore) -> Iterator[None]:
    store._file.run("PRAGMA query_only = 1")
    try:
        yield
    finally:
        store._file.run("PRAGMA query_only = 0")


@contextmanager
def frozen(url: str) -> Iterator[None]:
    with redis.Redis.from_url(url) as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def frozen_redis(empty_redis_url: str) -> Outage:
    return lambda: frozen(empty_redis_url)
