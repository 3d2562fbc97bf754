"""Certificates for tests: signed by themselves, for 127.0.0.1."""

import datetime
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ADDRESS = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])


def write_certificate(folder: Path, *, days: int = 30, password: bytes | None = None) -> dict[str, str]:
    """A new key and its certificate, as the settings of [server] that name them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hearth test")])
    ends = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(x509.random_serial_number()).add_extension(ADDRESS, critical=False)
    made = made.not_valid_before(ends - datetime.timedelta(days=400)).not_valid_after(ends)
    sealed = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, sealed)
    certificate, path = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    path.write_bytes(private)
    path.chmod(0o600)
    return {"certificate": str(certificate), "key": str(path)}


def trusting(certificate: str) -> ssl.SSLContext:
    """A client's context that takes this certificate and no other."""
    return ssl.create_default_context(cafile=certificate)
