"""Opens the store that a URL names. Nobody else imports the two implementations."""

from typing import Final

from tenants.store.protocol import Clock, Store

_REDIS: Final = ("redis://", "rediss://", "unix://", "sentinel://", "sentinels://")


def open_store(url: str, clock: Clock | None = None) -> Store:
    """`sqlite:PATH` (created when missing), `redis://HOST:PORT/DB` or `sentinel://HOST,HOST,HOST/NAME`, both also with
    TLS. Without a clock SQLite reads the machine's, Redis its own. Raises StoreUnavailable when the file cannot be
    used, ValueError for another url, or where a file of certificates that it names cannot be read."""
    if url.startswith("sqlite:"):
        from tenants.store.sqlite.store import SqliteStore

        return SqliteStore(url.removeprefix("sqlite:"), clock)
    if url.startswith(_REDIS):
        from tenants.store.redis.store import RedisStore

        return RedisStore(url, clock)
    raise ValueError(
        f"store url {safe_url(url)!r} is neither sqlite:PATH nor redis://HOST:PORT/DB nor sentinel://HOST,HOST/NAME"
    )


def safe_url(url: str) -> str:
    """The URL without what may be secret in it: for people."""
    if url.startswith("sqlite:"):
        return url
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('@')[-1].split('?')[0]}"
