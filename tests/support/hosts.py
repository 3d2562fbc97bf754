"""Hosts of a cluster for tests: an authority, and the files of as many hosts as a test wants."""

import time
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from gateway.identity.authority import CERTIFICATE_S, CertificateAuthority, found_authority, open_authority
from gateway.identity.files import HostFiles, write_identity
from gateway.identity.host_identity import HostIdentity, HostRole
from gateway.identity.settings import IdentityPaths

SECRET = b"s" * 32


@dataclass(frozen=True)
class HostMaker:
    """Makes hosts of one cluster below a folder."""

    folder: Path
    authority: CertificateAuthority

    def paths(self, name: str) -> IdentityPaths:
        folder = self.folder / name
        return IdentityPaths(folder / "certificate.pem", folder / "key.pem", folder / "authority.pem")

    def host(
        self,
        role: HostRole,
        name: str,
        *,
        region: str = "",
        age_s: float = 0.0,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> HostFiles:
        """A host whose certificate is `age_s` old."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        identity = HostIdentity(self.authority.cluster, role, name, region)
        certificate = self.authority.sign(key.public_key(), identity, time.time() - age_s)
        write_identity(self.paths(name), key, certificate, self.authority.pem)
        return HostFiles(self.paths(name))

    def expired(self, role: HostRole, name: str) -> HostFiles:
        return self.host(role, name, age_s=CERTIFICATE_S + 60)


def host_maker(folder: Path, cluster: str = "test") -> HostMaker:
    return HostMaker(folder, open_authority(found_authority(cluster, SECRET, time.time()), SECRET))
