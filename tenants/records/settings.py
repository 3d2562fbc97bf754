"""An account's own settings."""

import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

SHARING_MAX: Final = 16  # accounts of one sharing group
REGIONS_MAX: Final = 16


class Notices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Soft caps: that a part of a neuron limit is used is told to `url`, once a window for each of `at`.

    http:// is for where the operator allows private addresses (gateway/webhook.py).
    """

    url: Annotated[str, Meta(max_length=500, pattern="^[!-~]+$")]
    at: Annotated[tuple[float, ...], Meta(min_length=1, max_length=10)] = (0.8, 1.0)

    def __post_init__(self) -> None:
        if any(not 0 < part <= 1 for part in self.at):
            raise ValueError("'at' has parts of a limit, above 0 and at most 1")
        parts = urlsplit(self.url)
        if not parts.hostname or parts.scheme not in ("https", "http"):
            raise ValueError(f"{self.url!r} is no https:// address")
        if parts.username is not None or parts.fragment:
            raise ValueError("the address of notices has no user and no fragment in it; they are signed instead")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An account's own wishes.

    zero_retention   no byte of its prompts and completions outlives its request, but for KV, for at most cache_keep_s.
    cache_scope      who shares cached prefixes: all its callers, those of one `user`, or nobody but the request itself.
    cache_keep_s     how long a cached prefix is found after its last use; None: until it is evicted.
    sharing          ids of the accounts, its own among them, that share cached prefixes; it takes effect once the
                     settings of all of them name the very same.
    regions          where its calls may be served; empty: everywhere.
    """

    zero_retention: bool = False
    cache_scope: Literal["tenant", "user", "request"] = "tenant"
    cache_keep_s: Annotated[float, Meta(ge=1, le=604_800)] | None = None
    sharing: Annotated[tuple[str, ...], Meta(max_length=SHARING_MAX)] = ()
    regions: Annotated[tuple[Annotated[str, Meta(pattern="^[a-z0-9-]{1,32}$")], ...], Meta(max_length=REGIONS_MAX)] = ()
    notices: Notices | None = None

    def __post_init__(self) -> None:
        for name in ("sharing", "regions"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name} has an entry twice")
        if any(not re.fullmatch(r"[0-9a-f]{32}", one) for one in self.sharing):
            raise ValueError("sharing has account ids: 32 hex characters each")


def cache_retention_s(settings: Settings) -> float | None:
    """How long its cached prefixes are found after their last use; under zero retention at most 5 minutes."""
    if not settings.zero_retention:
        return settings.cache_keep_s
    return min(settings.cache_keep_s or ZERO_RETENTION_KEEP_S, ZERO_RETENTION_KEEP_S)


ZERO_RETENTION_KEEP_S: Final = 300.0
