"""Trust between cells: TLS contexts of this host's identity, and the cell that a peer's certificate is of. A cell is
its cluster; its authority alone signs its gateways, and no other cell's can."""

import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from gateway.identity.cell_settings import OtherCell
from gateway.identity.files import HostFiles
from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError, peer_identity

RELOAD_S: Final = 30.0


class CellTrust:
    """This host's side of TLS with other cells. Raises IdentityError where a file of theirs cannot be used."""

    def __init__(self, files: HostFiles, others: Sequence[OtherCell]) -> None:
        self._files = files
        self._authorities = {other.name: _authority(other) for other in others}
        self._texts = {other.name: Path(other.authority).read_text() for other in others}
        if files.credentials().identity.role is not HostRole.GATEWAY:
            raise IdentityError("cells are connected by their gateways, and this host is none")
        if self.cell in self._authorities:
            raise IdentityError(f"[[cells.others]] names {self.cell}, which is this cell itself")

    @property
    def identity(self) -> HostIdentity:
        return self._files.credentials().identity

    @property
    def cell(self) -> str:
        return self.identity.cluster

    def server(self) -> ssl.SSLContext:
        """Takes connections of other cells' gateways alone. `renew` puts a new certificate of this host into it."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER, "\n".join(self._texts.values()))
        context.num_tickets = 0
        return context

    def client(self, cell: str) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT, self._texts[cell])

    def renew(self, context: ssl.SSLContext) -> None:
        """Later handshakes show the certificate that there is now. Raises IdentityError."""
        paths = self._files.paths
        try:
            context.load_cert_chain(paths.certificate, paths.key, password="")
        except (ssl.SSLError, OSError) as error:
            raise IdentityError(f"{paths.certificate} and {paths.key} cannot be used: {error}") from None

    def _context(self, protocol: int, authorities: str) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=authorities)
        self.renew(context)
        return context

    def peer(self, certificate: Mapping[str, Any] | None, encoded: bytes | None) -> HostIdentity:
        """The gateway of another cell that showed this verified certificate. Raises IdentityError."""
        identity = peer_identity(certificate)
        authority = self._authorities.get(identity.cluster)
        if authority is None or encoded is None:
            raise IdentityError(f"{identity.cluster} is no cell of [[cells.others]]")
        try:
            x509.load_der_x509_certificate(encoded).verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature):
            raise IdentityError(f"a certificate of {identity.uri} is not signed by that cell's authority") from None
        if identity.role is not HostRole.GATEWAY:
            raise IdentityError(f"{identity} is no gateway")
        return identity


def _authority(other: OtherCell) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(Path(other.authority).read_bytes())
    except (OSError, ValueError) as error:
        raise IdentityError(
            f"the authority of the cell {other.name}, {other.authority}, cannot be read: {error}"
        ) from None
