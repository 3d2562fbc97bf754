"""What tests of several rooms share: a real Redis, and Triton's interpreter where there is no GPU."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import VOLATILE, RedisServer

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel is imported


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of this test session on a free port of 127.0.0.1, without persistence; stopped at the end."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), VOLATILE)
    server.start()
    try:
        yield server.url
    finally:
        server.close()
