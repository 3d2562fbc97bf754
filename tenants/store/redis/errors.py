"""What Redis raises, told as StoreUnavailable with advice for an operator. It asks nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as NoAnswer

from tenants.store.protocol import StoreUnavailable

_FULL: Final = "its memory is full; raise maxmemory and keep `maxmemory-policy noeviction`"
_REPLICA: Final = "this is a replica; name the primary in [store] url, or the Sentinels that know it: sentinel://…"
_PASSWORD: Final = "the password in [store] url is wrong"
_RIGHTS: Final = "its user may not do this; docs/store.md has the rights that one needs"
_LOADING: Final = "it is still loading its data; wait"

# By what a message has in it. redis-py leaves the first word out of some.
_ADVICE: Final = {
    "OOM": _FULL,
    "'maxmemory'": _FULL,
    "MISCONF": "it cannot save to its disk; free some space there",
    "READONLY": _REPLICA,
    "read only replica": _REPLICA,
    "NOREPLICAS": "it has fewer replicas than min-replicas-to-write asks for, and takes no writes until they are back",
    "NOTALL": "the account's plan is strict, and waits for every replica; see that all run and follow the primary",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not signed by [store] ca, or not for that name",
    "UNKNOWNNAME": "correct the name in [store] url, or `sentinel monitor` it",
    "LOADING": _LOADING,
    "is loading the dataset": _LOADING,
    "NOAUTH": "it wants a password; put it into [store] url",
    "Authentication required": "it wants a password; put it into [store] url",
    "WRONGPASS": _PASSWORD,
    "invalid username-password": _PASSWORD,
    "NOPERM": _RIGHTS,
    "no permissions": _RIGHTS,
    "NOSENTINEL": "see that they run, and that [store] url names them",
}


@contextmanager
def redis_errors() -> Iterator[None]:
    """What Redis raises inside becomes StoreUnavailable with advice."""
    try:
        yield
    except (RedisError, OSError) as error:
        raise unavailable(error) from error


def unavailable(error: Exception, *, unsure: bool = False) -> StoreUnavailable:
    other = "see that it runs, and that [store] url in the settings names it"
    if isinstance(error, (NoAnswer, TimeoutError)):
        other = "it does not answer in time; see whether it hangs, swaps or is overloaded"
    advice = next((advice for sign, advice in _ADVICE.items() if sign in str(error)), other)
    said = str(error).rstrip(".") or type(error).__name__
    return StoreUnavailable(f"Redis: {said}: {advice}", unsure=unsure)
