"""Opens the store that a URL names. Nobody else imports the two implementations."""

from tenants.store.protocol import Clock, Store


def open_store(url: str, clock: Clock | None = None) -> Store:
    """`sqlite:PATH` (created when missing) or `redis://HOST:PORT/DB`. Without a clock SQLite reads the machine's, Redis
    its own. Raises StoreUnavailable when the file cannot be used, ValueError for another url."""
    if url.startswith("sqlite:"):
        from tenants.store.sqlite.store import SqliteStore

        return SqliteStore(url.removeprefix("sqlite:"), clock)
    if url.startswith(("redis://", "rediss://", "unix://")):
        from tenants.store.redis.store import RedisStore

        return RedisStore(url, clock)
    raise ValueError(f"store url {url!r} is neither sqlite:PATH nor redis://HOST:PORT/DB")
