"""A host's name as its certificate says it: a SPIFFE URI of cluster, region, site, role and name. It opens no file and
no connection."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

REGION: Final = re.compile(r"[a-z0-9-]{0,32}")
HOST_NAME: Final = re.compile(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_SCHEME: Final = "spiffe://"


class IdentityError(ValueError):
    """A certificate, key or name that identifies no host of this cluster; the message says why and what to do."""


class HostRole(enum.StrEnum):
    """What a host does, which decides what it may open on others."""

    GATEWAY = "gateway"
    MACHINE = "machine"


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Region and site may be empty. Raises IdentityError where a part cannot be one."""

    cluster: str
    role: HostRole
    name: str
    region: str = ""
    site: str = ""

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.cluster):
            raise IdentityError(f"{self.cluster!r} is no name of a cluster: use a-z, 0-9, - and . (63 at most)")
        if not HOST_NAME.fullmatch(self.name):
            raise IdentityError(f"{self.name!r} is no name of a host: use a-z, 0-9, - and . (63 at most)")
        for kind, part in (("region", self.region), ("site", self.site)):
            if not REGION.fullmatch(part):
                raise IdentityError(f"{part!r} is no {kind}: use a-z, 0-9 and - (32 at most)")

    @property
    def uri(self) -> str:
        """`spiffe://CLUSTER/region/R/site/S/ROLE/NAME`, without what is empty."""
        places = "".join(f"/{kind}/{part}" for kind, part in (("region", self.region), ("site", self.site)) if part)
        return f"{_SCHEME}{self.cluster}{places}/{self.role}/{self.name}"

    @property
    def member_id(self) -> str:
        return f"{self.role}/{self.name}"

    def __str__(self) -> str:
        places = ", ".join(f"{kind} {part}" for kind, part in (("region", self.region), ("site", self.site)) if part)
        return f"{self.role} {self.name}" + (f" ({places})" if places else "")


def parse_identity(uri: str) -> HostIdentity:
    """The identity that `uri` writes. Raises IdentityError."""
    cluster, *path = uri.removeprefix(_SCHEME).split("/") if uri.startswith(_SCHEME) else [""]
    keys, values = path[::2], path[1::2]
    parts = dict(zip(keys, values, strict=False))
    roles = [role for role in HostRole if role in parts]
    if len(keys) != len(values) or len(parts) != len(keys) or len(roles) != 1 or {*parts} - {"region", "site", *roles}:
        raise IdentityError(f"{uri!r} names no host: it is to be {_SCHEME}CLUSTER/region/R/site/S/machine/NAME")
    role = roles[0]
    return HostIdentity(cluster, role, parts[role], parts.get("region", ""), parts.get("site", ""))


def peer_identity(certificate: Mapping[str, Any] | None) -> HostIdentity:
    """The identity in a peer's verified certificate, as `SSLSocket.getpeercert` gives it. Raises IdentityError."""
    names = (certificate or {}).get("subjectAltName", ())
    uris = [name for kind, name in names if kind == "URI"]
    if len(uris) != 1:
        raise IdentityError(f"the certificate has {len(uris)} URIs that could name its host, and is to have one")
    return parse_identity(uris[0])
