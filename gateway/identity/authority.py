"""A cluster's authority: it is founded once, signs hosts' certificates, and keeps its key sealed under the server's
secret. It knows neither the store nor who may join."""

import datetime
import hashlib
import hmac
import secrets
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gateway.identity.host_identity import HostIdentity, IdentityError
from tenants.records.cluster import ClusterAuthority

CERTIFICATE_S: Final = 24 * 3600
# Certificates hold from so long before they are made, and count for as long beyond their end where somebody's being
# shut out depends on it: hosts' clocks may differ.
SKEW_S: Final = 2 * 3600
_AUTHORITY_DAYS: Final = 3650
_NONCE_BYTES: Final = 12
_POINT_BYTES: Final = 65
_USAGES: Final = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
_OTHER_USAGES: Final = ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")


class CertificateAuthority:
    """Signs for one cluster. `pem` is its own certificate."""

    def __init__(self, cluster: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self.cluster = cluster
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self._certificate = certificate
        self._key = key

    def sign(self, public_key: ec.EllipticCurvePublicKey, identity: HostIdentity, now: float) -> bytes:
        """The certificate in PEM that says that this key is that host's, for CERTIFICATE_S."""
        begins, ends = _moment(now - SKEW_S), _moment(now + CERTIFICATE_S)
        builder = _builder(identity.name, self._certificate.subject, public_key, begins, ends)
        signer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
            (x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def found_authority(cluster: str, secret: bytes, now: float) -> ClusterAuthority:
    """A new authority for the store."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"hearth cluster {cluster}"[:64])])
    begins, ends = _moment(now - SKEW_S), _moment(now + _AUTHORITY_DAYS * 86_400)
    builder = _builder(f"hearth cluster {cluster}", name, key.public_key(), begins, ends)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return ClusterAuthority(cluster, pem, nonce + _vault(secret).encrypt(nonce, key_pem(key), cluster.encode()))


def open_authority(record: ClusterAuthority, secret: bytes) -> CertificateAuthority:
    """The authority that the store keeps. Raises IdentityError where it was founded with another secret."""
    nonce, sealed = record.sealed_key[:_NONCE_BYTES], record.sealed_key[_NONCE_BYTES:]
    try:
        key = read_key(_vault(secret).decrypt(nonce, sealed, record.cluster.encode()))
    except InvalidTag:
        raise IdentityError(
            f"this host's secret is not that of the cluster {record.cluster}: a gateway gets it as it joins "
            "(`hearth gateway --join`), or copy the file `secret` from the state folder of one that serves"
        ) from None
    return CertificateAuthority(record.cluster, x509.load_pem_x509_certificate(record.certificate), key)


def authority_digest(pem: bytes) -> str:
    """What tokens to join carry of an authority, so that hosts know it when they meet it."""
    return key_digest(x509.load_pem_x509_certificate(pem).public_key())


def certificate_key(der: bytes) -> str:
    """The digest of a certificate's key. Raises IdentityError."""
    return key_digest(x509.load_der_x509_certificate(der).public_key())


def key_digest(key: object) -> str:
    """A public key's name: SHA-256 of its SubjectPublicKeyInfo, in hex. Raises IdentityError for other keys than
    P-256's."""
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise IdentityError("a host's key is to be one of the curve P-256")
    info = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(info).hexdigest()


def signing_request(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate signing request (DER): it shows who has the key, and asks for nothing else."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def requested_key(request: bytes) -> ec.EllipticCurvePublicKey:
    """The key of a signing request, which its sender has; names in it do not count. Raises IdentityError."""
    try:
        parsed = x509.load_der_x509_csr(request)
        signed = parsed.is_signature_valid
    except (ValueError, InvalidSignature, TypeError):
        raise IdentityError("the signing request cannot be read") from None
    if not signed:
        raise IdentityError("the signing request is not signed by its own key")
    key = parsed.public_key()
    key_digest(key)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def seal_to(key: ec.EllipticCurvePublicKey, plain: bytes) -> bytes:
    """Seals for the one who has this key: ECDH with a key of the moment, HKDF, AES-GCM."""
    moment = ec.generate_private_key(ec.SECP256R1())
    point = _point(moment.public_key())
    return point + _shared(moment.exchange(ec.ECDH(), key), point).encrypt(bytes(_NONCE_BYTES), plain, None)


def open_sealed(key: ec.EllipticCurvePrivateKey, sealed: bytes) -> bytes:
    """What was sealed to this key. Raises IdentityError."""
    try:
        point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), sealed[:_POINT_BYTES])
        cipher = _shared(key.exchange(ec.ECDH(), point), sealed[:_POINT_BYTES])
        return cipher.decrypt(bytes(_NONCE_BYTES), sealed[_POINT_BYTES:], None)
    except (ValueError, InvalidTag):
        raise IdentityError("the secret in the answer is not sealed to this host's key") from None


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Raises IdentityError."""
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError):
        raise IdentityError("it is no unencrypted private key in PEM") from None
    key_digest(key.public_key())
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def _builder(
    name: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    begins: datetime.datetime,
    ends: datetime.datetime,
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in names for usage in (*_USAGES, *_OTHER_USAGES)})


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC)


def _vault(secret: bytes) -> AESGCM:
    return AESGCM(hmac.digest(secret, b"hearth cluster authority", "sha256"))


def _point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def _shared(agreed: bytes, point: bytes) -> AESGCM:
    """A cipher that is used once, so that its nonce may be what it is."""
    return AESGCM(HKDF(hashes.SHA256(), 32, salt=point, info=b"hearth sealed secret").derive(agreed))
