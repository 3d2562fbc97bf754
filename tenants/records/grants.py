"""Rights of a credential: permissions, models by pattern, networks. It does not know the request."""

import enum
import fnmatch
import ipaddress
from typing import Final

import msgspec

ENTRIES_MAX: Final = 100  # of each list
PATTERN_MAX: Final = 200


class Permission(enum.StrEnum):
    INFERENCE = "inference"  # calls of models, and their list
    USAGE_READ = "usage:read"  # what the account has used
    ACCOUNT_ADMIN = "account:admin"  # the account's tokens, limits and settings
    OPERATOR = "operator"  # all accounts
    METRICS_READ = "metrics:read"  # the gateway's metrics, which name all accounts


# Permissions that reach beyond an account: only an operator may give them, or change a token that has one.
BEYOND_ACCOUNT: Final = (Permission.OPERATOR, Permission.METRICS_READ)


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rights of one credential. The defaults are those of tokens from before grants: all models, from everywhere.

    models      patterns of catalogue names, * and ? as in file names; a name that matches none is not served.
    networks    in CIDR notation; empty for everywhere.
    Raises ValueError in words for people.
    """

    permissions: tuple[Permission, ...] = (Permission.INFERENCE,)
    models: tuple[str, ...] = ("*",)
    networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.permissions:
            raise ValueError(f"a token without permissions opens nothing; give some of {', '.join(Permission)}")
        for name in ("permissions", "models", "networks"):
            entries = getattr(self, name)
            if len(entries) > ENTRIES_MAX:
                raise ValueError(f"{len(entries)} {name}; the most is {ENTRIES_MAX}")
            if len(set(entries)) != len(entries):
                raise ValueError(f"{name} has an entry twice")
        for pattern in self.models:
            if not 0 < len(pattern) <= PATTERN_MAX or not pattern.isprintable():
                raise ValueError(f"a model pattern is 1 to {PATTERN_MAX} printable characters, not {pattern!r}")
        for network in self.networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{network!r} is no network: {error}; write it like 10.0.0.0/8 or ::1/128") from None

    def permits(self, permission: Permission) -> bool:
        return permission in self.permissions

    def serves(self, model: str) -> bool:
        """Whether a model of this catalogue name may be called."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def reaches(self, address: str) -> bool:
        """Whether a caller at this address may use it. Where there are networks, what is no address may not."""
        if not self.networks:
            return True
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
            ip = ip.ipv4_mapped
        return any(ip in ipaddress.ip_network(network) for network in self.networks)
