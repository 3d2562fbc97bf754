"""What an operator should change about a Redis or Valkey and its Sentinels, so that a store keeps what it promises.

It changes nothing. docs/store.md says what each setting is for.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from redis.exceptions import RedisError

from tenants.store.redis.database import RedisDatabase
from tenants.store.redis.errors import redis_errors
from tenants.store.redis.sentinel import PrimaryPlace, find_primary

# Earlier ones let scripts write where min-replicas-to-write forbids it (redis/redis#10249); every decision is one.
GUARDED_SCRIPTS: Final = (6, 2, 7)
MAX_LAG_S: Final = 1
DOWN_AFTER_MS: Final = 3000  # a cut-off primary has stopped by then: max-lag, and a second that it takes to see it
SENTINELS: Final = 3


async def advice_for(database: RedisDatabase) -> Sequence[str]:
    """Raises StoreUnavailable."""
    info: dict[str, Any] = {}
    for section in await database.read(
        *(("INFO", name) for name in ("server", "persistence", "memory", "replication"))
    ):
        info |= section
    lines = list(_durable(info))
    address = database.primary.address
    if address.sentinels:
        with redis_errors():
            place = await find_primary(address)
        (pairs,) = await database.pipeline.ask(("CONFIG", "GET", "min-replicas-*"))
        texts = [] if isinstance(pairs, RedisError) else [text.decode() for text in pairs]
        settings = dict(zip(texts[::2], texts[1::2], strict=True))
        lines += [*_guarded(info, settings, place), *_watched(place, len(address.sentinels))]
    return lines


def _durable(info: Mapping[str, Any]) -> Iterator[str]:
    name = "Valkey" if "valkey_version" in info else "Redis"
    if info["maxmemory"] and info["maxmemory_policy"] != "noeviction":
        yield f"{name} may evict accounts and usage: set `maxmemory-policy noeviction`"
    if not info["aof_enabled"]:
        yield f"{name} forgets everything since its last snapshot when it stops: set `appendonly yes`"


def _guarded(info: Mapping[str, Any], settings: Mapping[str, str], place: PrimaryPlace) -> Iterator[str]:
    """Whether a primary that is cut off from its replicas stops before another is promoted."""
    version = str(info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < GUARDED_SCRIPTS:
        yield f"Redis {version} does not hold scripts to min-replicas-to-write: run 6.2.7 or newer, or Valkey"
    if not settings:
        yield "whether min-replicas-to-write is set cannot be seen: let the user of [store] url do `CONFIG GET`"
    elif int(settings["min-replicas-to-write"]) < 1:
        yield (
            "a primary that is cut off grants on until the cut ends, and what it granted passes limits: "
            f"set `min-replicas-to-write 1` and `min-replicas-max-lag {MAX_LAG_S}` on every server"
        )
    elif int(settings["min-replicas-max-lag"]) > MAX_LAG_S:
        lag = settings["min-replicas-max-lag"]
        yield f"a primary that is cut off grants on for {lag} s and more: set `min-replicas-max-lag {MAX_LAG_S}`"
    if int(info["connected_slaves"]) < place.replicas:
        yield (
            f"{info['connected_slaves']} of {place.replicas} replicas follow: strict plans are refused until all do; "
            "for one that is gone for good, `sentinel reset NAME` on each Sentinel"
        )
    elif not place.replicas:
        yield "there is no replica, and so nobody to promote: start one or two"


def _watched(place: PrimaryPlace, listed: int) -> Iterator[str]:
    if place.sentinels < SENTINELS:
        yield f"{place.sentinels} Sentinels cannot agree once one is lost: run {SENTINELS}, on hosts of their own"
    elif place.quorum != place.sentinels // 2 + 1:
        wanted = place.sentinels // 2 + 1
        yield f"{place.quorum} of {place.sentinels} Sentinels call a primary lost: set the quorum to {wanted}"
    if listed < place.sentinels:
        yield f"[store] url names {listed} of {place.sentinels} Sentinels: name all of them"
    if place.down_after_ms < DOWN_AFTER_MS:
        yield (
            f"another is promoted after {place.down_after_ms} ms, when a primary that is cut off may still grant: "
            f"set `down-after-milliseconds {DOWN_AFTER_MS}` on each Sentinel"
        )
