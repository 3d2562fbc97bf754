"""What the store keeps of the hosts that serve together: their authority, the tokens that let hosts join, and the
members. It knows neither certificates nor keys, only their bytes."""

import enum

import msgspec


class JoinOutcome(enum.StrEnum):
    """What became of a host that wants to join."""

    ADMITTED = "admitted"
    UNKNOWN_TOKEN = "unknown_token"
    USED_TOKEN = "used_token"  # as often as it may be
    NAME_TAKEN = "name_taken"  # by a member with another key, whose certificate holds
    REMOVED_KEY = "removed_key"


class ClusterAuthority(msgspec.Struct, frozen=True, array_like=True):
    """What signs the certificates of a cluster's hosts. The key is sealed under the server's secret."""

    cluster: str
    certificate: bytes
    sealed_key: bytes


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """What a host may join as. `digest` is of the token's secret part; an empty `name` leaves it to the host."""

    id: str
    digest: bytes
    role: str
    region: str
    site: str
    name: str
    uses: int
    expires_at: int


class ClusterMember(msgspec.Struct, frozen=True, array_like=True):
    """A host of the cluster, by role and name.

    key         a digest of its public key.
    address     HOST:PORT: of a machine's porter, or where other hosts join at a gateway.
    expires_at  when its certificate does.
    """

    name: str
    role: str
    region: str
    site: str
    key: str
    address: str
    joined_at: int
    expires_at: int

    @property
    def id(self) -> str:
        return f"{self.role}/{self.name}"
