"""A store of either kind, empty; and a day that does not end."""

from pathlib import Path

import pytest
import redis

from tenants.store.redis import pipeline
from tests.support.waiting import wait_for_a_day


@pytest.fixture(params=["sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'hearth.db'}"
    monkeypatch.setattr(pipeline, "ANSWER_S", 1.0)  # what is tested is not how fast a busy machine's Redis answers
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
        client.script_flush()
    return url


@pytest.fixture
def one_day() -> None:
    """Midnight does not pass in this test."""
    wait_for_a_day()
