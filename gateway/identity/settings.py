"""[cluster] of hearth.toml: this host among others. It reads no file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

_PLACE = r"^(\[[0-9a-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"


def _doc(description: str, pattern: str | None = None) -> Meta:
    return Meta(description=description, pattern=pattern)


@dataclass(frozen=True, slots=True)
class IdentityPaths:
    """Where a host's three files are, all in PEM."""

    certificate: Path
    key: Path
    authority: Path

    def __iter__(self) -> Iterator[Path]:
        return iter((self.certificate, self.key, self.authority))

    @property
    def exist(self) -> bool:
        return all(path.is_file() for path in self)


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cluster]: nothing of it counts on a host that has joined none."""

    join_listen: Annotated[str, _doc("HOST:PORT of a gateway where hosts join and renew", _PLACE)] = "0.0.0.0:8790"
    porter_listen: Annotated[str, _doc("HOST:PORT of a machine where gateways connect", _PLACE)] = "0.0.0.0:8791"
    address: Annotated[
        str,
        _doc("name or IP address that others reach this host by; default: as a gateway sees it", r"^[A-Za-z0-9.:_-]*$"),
    ] = ""
    certificate: Annotated[str, _doc("PEM file of your own PKI, read anew when changed; with `key`, `authority`")] = ""
    key: Annotated[str, _doc("PEM file of the certificate's private key, P-256, not encrypted")] = ""
    authority: Annotated[str, _doc("PEM file of the authority that signs all hosts' certificates")] = ""
    members: Annotated[
        str,
        _doc(
            "where a gateway learns of machines: static (machine.addresses), store, or kubernetes:NAMESPACE/SERVICE; "
            "default: store on a host that joined, else static",
            r"^(|static|store|kubernetes:[a-z0-9-]{1,63}/[a-z0-9-]{1,63})$",
        ),
    ] = ""

    def __post_init__(self) -> None:
        if len({bool(path) for path in (self.certificate, self.key, self.authority)}) > 1:
            raise ValueError("`certificate`, `key` and `authority` go together; name all three or none")

    @property
    def own_pki(self) -> bool:
        """Whether somebody else makes this host's certificates."""
        return bool(self.certificate)

    def paths(self, state: Path) -> IdentityPaths:
        """Where this host's identity is, or will be once it has joined."""
        if self.own_pki:
            return IdentityPaths(Path(self.certificate), Path(self.key), Path(self.authority))
        folder = state / "identity"
        return IdentityPaths(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")

    def mirror_path(self, state: Path) -> Path:
        """Where this host keeps its cluster's catalogue, as it was told last."""
        return state / "catalogue.json"

    def models_folder(self, state: Path) -> Path:
        """Where the files of the cluster's models are on this host."""
        return state / "models" / ".cluster"

    def told_address(self, listen: str) -> str:
        """What this host tells of where it is reached: HOST:PORT, HOST empty where a gateway is to see it."""
        port = listen.rpartition(":")[2]
        return f"[{self.address}]:{port}" if ":" in self.address else f"{self.address}:{port}"
