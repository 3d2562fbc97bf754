"""[cells] of hearth.toml: the cells beside this one. It reads no file."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.identity.host_identity import HOST_NAME

_PLACE = r"^(\[[0-9a-f:]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$"


def _doc(description: str, pattern: str | None = None) -> Meta:
    return Meta(description=description, pattern=pattern)


class OtherCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[cells.others]]: one other cell."""

    name: Annotated[str, _doc("name of the cell, which is its cluster's: `hearth cluster init --cluster NAME`")]
    addresses: Annotated[
        list[Annotated[str, Meta(pattern=_PLACE)]],
        Meta(description="HOST:PORT where its gateways listen for other cells", min_length=1, max_length=16),
    ]
    authority: Annotated[str, _doc("PEM file of its authority: `identity/authority.pem` in a gateway's state folder")]

    def __post_init__(self) -> None:
        if not HOST_NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is no name of a cell: use a-z, 0-9, - and .")


class CellsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[cells]: nothing of it counts without others."""

    listen: Annotated[str, _doc("HOST:PORT where gateways of other cells connect", _PLACE)] = "0.0.0.0:8792"
    others: Annotated[list[OtherCell], Meta(description="the cells beside this one", max_length=16)] = []

    def __post_init__(self) -> None:
        names = [other.name for other in self.others]
        if len(set(names)) < len(names):
            raise ValueError("`others` has a cell twice")
