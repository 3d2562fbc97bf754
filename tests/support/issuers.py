"""Issuers of JWTs: their private keys, what they sign, and a real HTTPS server of their public keys."""

import asyncio
import base64
import datetime
import functools
import hashlib
import hmac
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tenants.auth.issuers import Issuer

ALGORITHMS: Final = ("EdDSA", "ES256", "RS256")


class _Missing:
    """Its name is part of tests' names, which must be the same in every process."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Final = _Missing()
AUDIENCE: Final = "https://hearth.example"
ACCOUNT: Final = "0123456789abcdef0123456789abcdef"

Sign = Callable[[bytes], bytes]


def url64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


@functools.cache
def private_key(kind: str) -> Any:
    """The same one each time that a kind (an algorithm, perhaps with more words) is asked for; RSA takes a while."""
    algorithm, *more = kind.split()
    if algorithm == "EdDSA":
        return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(kind.encode()).digest())
    if algorithm == "RS256":
        return rsa.generate_private_key(65537, 1024 if "weak" in more else 2048)
    return ec.generate_private_key(ec.SECP384R1() if "P-384" in more else ec.SECP256R1())


def jwk(kind: str, kid: str, **changes: Any) -> dict[str, Any]:
    """The public part of a key, as it stands in a JWKS."""
    public, algorithm = private_key(kind).public_key(), kind.split()[0]
    writer: Any = {"EdDSA": OKPAlgorithm, "ES256": ECAlgorithm, "RS256": RSAAlgorithm}[algorithm]
    return {**writer.to_jwk(public, as_dict=True), "kid": kid, "alg": algorithm, **changes}


def signer(kind: str, digest: Any = hashes.SHA256) -> Sign:
    key, algorithm = private_key(kind), kind.split()[0]
    if algorithm == "EdDSA":
        return key.sign  # type: ignore[no-any-return]
    if algorithm == "RS256":
        return lambda text: key.sign(text, padding.PKCS1v15(), digest())
    return lambda text: raw(*decode_dss_signature(key.sign(text, ec.ECDSA(digest()))), (key.key_size + 7) // 8)


def raw(r: int, s: int, size: int = 32) -> bytes:
    """A signature of ECDSA as JOSE has it; the size is that of P-256."""
    return r.to_bytes(size, "big") + s.to_bytes(size, "big")


def compact(header: Any, claims: Any, sign: Sign) -> str:
    """Bytes are taken as they are, everything else is written as JSON."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]
    text = ".".join(url64(part) for part in parts)
    return f"{text}.{url64(sign(text.encode()))}"


def without(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not MISSING}


class World:
    """Four issuers: one of each algorithm, and one whose claims are mapped. It signs what a test wants signed."""

    def __init__(self, now: float, url: str, ca_file: str) -> None:
        self.now = int(now)
        self.settings = [
            Issuer(
                name=algorithm.lower(),
                issuer=f"https://{algorithm.lower()}.example",
                audience=AUDIENCE,
                algorithm=algorithm,  # type: ignore[arg-type]
                jwks_url=f"{url}/{algorithm}",
                ca_file=ca_file,
                permissions=("inference",),
            )
            for algorithm in ALGORITHMS
        ]
        self.settings.append(
            Issuer(
                name="mapped",
                issuer="https://mapped.example",
                audience=AUDIENCE,
                algorithm="EdDSA",
                jwks_url=f"{url}/EdDSA",
                ca_file=ca_file,
                account_claim="team",
                accounts={"red": ACCOUNT},
                permissions_claim="scope",
                permissions_max=("inference", "operator"),
            )
        )

    def claims(self, issuer: str = "eddsa", **changes: Any) -> dict[str, Any]:
        given = {
            "iss": f"https://{issuer}.example",
            "aud": AUDIENCE,
            "sub": "ann",
            "jti": "1",
            "iat": self.now - 10,
            "exp": self.now + 600,
            "hearth_account": ACCOUNT,
        }
        return without({**given, **changes})

    def jwt(
        self,
        algorithm: str = "EdDSA",
        header: Any = None,
        sign: Sign | None = None,
        raw_claims: Any = None,
        **claims: Any,
    ) -> str:
        """A good one but for what is changed."""
        head = header if isinstance(header, bytes | list) else self.header(algorithm, **(header or {}))
        issued = self.claims(algorithm.lower(), **claims) if raw_claims is None else raw_claims
        return compact(head, issued, sign or signer(algorithm))

    def header(self, algorithm: str = "EdDSA", **changes: Any) -> dict[str, Any]:
        return without({"typ": "JWT", "alg": algorithm, "kid": f"{algorithm}-1", **changes})

    def hmac(self, secret: bytes, digest: str = "sha256", **header: Any) -> str:
        """Signed with what everybody knows."""
        return self.jwt(header={"alg": "HS256", **header}, sign=lambda text: hmac.digest(secret, text, digest))


def documents() -> dict[str, Any]:
    """What the issuers publish: their keys, and some that must not be used."""
    return {
        "/EdDSA": {
            "keys": [
                jwk("EdDSA", "EdDSA-1"),
                jwk("EdDSA encryption", "for-encryption", use="enc"),
                jwk("EdDSA signing", "for-signing", key_ops=["sign"]),
                jwk("EdDSA published", "published", d=url64(private_key("EdDSA published").private_bytes_raw())),
                jwk("ES256", "of-another-algorithm"),
                {"kty": "oct", "kid": "symmetric", "k": url64(b"k" * 32), "alg": "HS256"},
            ]
        },
        "/ES256": {"keys": [jwk("ES256", "ES256-1"), jwk("ES256 P-384", "P-384")]},
        "/RS256": {"keys": [jwk("RS256", "RS256-1"), jwk("RS256 weak", "weak")]},
    }


class JwksServer:
    """Serves `documents` by path; a document may be bytes as they are. A change holds from the next fetch."""

    def __init__(self) -> None:
        self.documents: dict[str, Any] = {}
        self.status = "200 OK"
        self.head = ""
        self.chunked = False
        self.delay_s = 0.0
        self.fetches: list[str] = []
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.fetches.append(path)
            await asyncio.sleep(self.delay_s)
            document = self.documents.get(path, {})
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            length = "transfer-encoding: chunked" if self.chunked else f"content-length: {len(body)}"
            if self.chunked:
                pieces = [body[start : start + 100] for start in range(0, len(body), 100)]
                body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*pieces, b""])
            writer.write(f"HTTP/1.1 {self.status}\r\n{length}\r\n{self.head}\r\n".encode() + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    @asynccontextmanager
    async def serving(self, folder: Path, host: str = "localhost") -> AsyncIterator[str]:
        """Gives its url. `folder/ca.pem` is what its certificate for `host` is trusted by."""
        listener = await asyncio.start_server(self.answer, "127.0.0.1", self.port, ssl=_tls(folder, host))
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield f"https://localhost:{self.port}"
        finally:
            listener.close()
            await listener.wait_closed()


def _tls(folder: Path, host: str) -> ssl.SSLContext:
    """With a new certificate that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an issuer")])
    names = [x509.DNSName(host), x509.IPAddress(ipaddress.ip_address("127.0.0.2"))]
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "ca.pem").write_bytes(public)
    (folder / "server.pem").write_bytes(key.private_bytes(*form) + public)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(folder / "server.pem")
    return tls
