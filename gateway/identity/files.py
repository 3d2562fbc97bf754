"""A host's three files, its key, its certificate and its cluster's authority, and the TLS contexts that they make. All
are read again as they change, whoever writes them: the host as it joins and renews, or an operator's own PKI."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from engine.process.files import file_stamp, replace_file
from gateway.identity.authority import key_digest, key_pem, read_key
from gateway.identity.host_identity import HostIdentity, IdentityError, parse_identity
from gateway.identity.settings import IdentityPaths

RENEW_SHARE: Final = 2 / 3  # of a certificate's life, after which it is renewed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostCredentials:
    """What the files said at one reading. `key_digest` names the key; times are in seconds since 1970."""

    identity: HostIdentity
    key: ec.EllipticCurvePrivateKey
    key_digest: str
    begins_s: float
    expires_s: float
    server: ssl.SSLContext  # which asks for a client's certificate, and takes a connection without one
    client: ssl.SSLContext

    @property
    def renew_s(self) -> float:
        """From when on the certificate is to be renewed."""
        return self.begins_s + RENEW_SHARE * (self.expires_s - self.begins_s)


class HostFiles:
    """The files, read again as they change. Raises IdentityError where they cannot be used at first; later the
    credentials before stay in force, and the fault is logged once."""

    def __init__(self, paths: IdentityPaths) -> None:
        self.paths = paths
        self._stamps = [file_stamp(path) for path in paths]
        self._credentials = read_credentials(paths)

    def credentials(self) -> HostCredentials:
        """What the files say now. Costs three calls of stat."""
        stamps = [file_stamp(path) for path in self.paths]
        if stamps != self._stamps:
            try:
                credentials = read_credentials(self.paths)
            except IdentityError as error:
                # A writer replaces the three one after the other, so half of a change says nothing yet.
                log.warning("the identity before stays in use: %s", error)
            else:
                if credentials.identity != self._credentials.identity:
                    log.warning("this host is %s from now on", credentials.identity)
                self._credentials = credentials
            self._stamps = stamps
        return self._credentials


def write_identity(paths: IdentityPaths, key: ec.EllipticCurvePrivateKey, certificate: bytes, authority: bytes) -> None:
    """Writes the files, each in one piece, for this user alone; the certificate last, which completes them."""
    paths.certificate.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(paths.key, key_pem(key))
    replace_file(paths.authority, authority)
    replace_file(paths.certificate, certificate)


def read_credentials(paths: IdentityPaths) -> HostCredentials:
    """Raises IdentityError, which names the file and its fault."""
    try:
        certificate = x509.load_pem_x509_certificate(_read(paths.certificate, "certificate"))
    except ValueError:
        raise IdentityError(f"{paths.certificate} is no certificate in PEM") from None
    key = read_key(_read(paths.key, "key"))
    digest = key_digest(certificate.public_key())
    if digest != key_digest(key.public_key()):
        raise IdentityError(f"the key {paths.key} is not that of the certificate {paths.certificate}")
    _read(paths.authority, "authority")
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    if len(uris) != 1:
        raise IdentityError(f"{paths.certificate} is to have one URI that names this host, and has {len(uris)}")
    return HostCredentials(
        parse_identity(uris[0]),
        key,
        digest,
        certificate.not_valid_before_utc.timestamp(),
        certificate.not_valid_after_utc.timestamp(),
        _context(paths, ssl.PROTOCOL_TLS_SERVER),
        _context(paths, ssl.PROTOCOL_TLS_CLIENT),
    )


def _context(paths: IdentityPaths, protocol: int) -> ssl.SSLContext:
    """TLS 1.3 alone, between hosts of this authority; what a host may do goes by its URI, not by a DNS name."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED if protocol == ssl.PROTOCOL_TLS_CLIENT else ssl.CERT_OPTIONAL
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections live long, and each begins with a whole handshake
    try:
        context.load_cert_chain(paths.certificate, paths.key, password="")
        context.load_verify_locations(paths.authority)
    except (ssl.SSLError, OSError) as error:
        raise IdentityError(
            f"{paths.certificate}, {paths.key} and {paths.authority} make no identity: "
            f"{getattr(error, 'reason', None) or error}"
        ) from None
    return context


def _read(path: Path, kind: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IdentityError(f"the {kind} {path} cannot be read: {error.strerror}") from None
