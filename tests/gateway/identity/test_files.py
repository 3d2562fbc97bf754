"""A host's three files as they are at first, and as they change."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from gateway.identity.authority import (
    found_authority,
    key_digest,
    open_authority,
    open_sealed,
    requested_key,
    seal_to,
    signing_request,
)
from gateway.identity.files import HostFiles, read_credentials
from gateway.identity.host_identity import HostRole, IdentityError
from tests.support.certificates import write_certificate
from tests.support.hosts import SECRET, host_maker


def test_files_are_read_again_as_they_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hosts = host_maker(tmp_path)
    files = hosts.host(HostRole.MACHINE, "m1")
    first = files.credentials()
    assert files.credentials() is first
    hosts.host(HostRole.MACHINE, "m1", region="eu")
    assert files.credentials().identity.region == "eu"
    assert "from now on" in caplog.text


def test_files_that_cannot_be_used_leave_the_identity_before_in_force(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = host_maker(tmp_path)
    files = hosts.host(HostRole.MACHINE, "m1")
    before = files.credentials()
    hosts.paths("m1").certificate.write_text("no certificate")
    assert files.credentials() is before
    assert files.credentials() is before
    assert caplog.text.count("stays in use") == 1
    hosts.host(HostRole.MACHINE, "m1", region="us")
    assert files.credentials().identity.region == "us"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda paths: paths.key.unlink(), "the key .* cannot be read"),
        (lambda paths: paths.key.write_text("x"), "no unencrypted private key"),
        (lambda paths: paths.certificate.write_text("x"), "no certificate in PEM"),
        (lambda paths: paths.authority.write_text("x"), "make no identity"),
        (lambda paths: write_certificate(paths.key.parent), "is to have one URI|is not that of|make no identity"),
    ],
)
def test_a_fault_is_said_by_name(tmp_path: Path, spoil: object, message: str) -> None:
    hosts = host_maker(tmp_path)
    hosts.host(HostRole.MACHINE, "m1")
    assert callable(spoil)
    spoil(hosts.paths("m1"))
    with pytest.raises(IdentityError, match=message):
        read_credentials(hosts.paths("m1"))


def test_a_key_that_is_another_s_is_refused(tmp_path: Path) -> None:
    hosts = host_maker(tmp_path)
    hosts.host(HostRole.MACHINE, "m1")
    hosts.host(HostRole.MACHINE, "m2")
    hosts.paths("m1").key.write_bytes(hosts.paths("m2").key.read_bytes())
    with pytest.raises(IdentityError, match="is not that of the certificate"):
        HostFiles(hosts.paths("m1"))


def test_an_authority_opens_with_its_secret_alone() -> None:
    record = found_authority("test", SECRET, 1e9)
    assert open_authority(record, SECRET).cluster == "test"
    with pytest.raises(IdentityError, match="secret is not that of the cluster"):
        open_authority(record, b"t" * 32)
    assert SECRET not in record.sealed_key
    assert b"PRIVATE KEY" not in record.sealed_key


def test_what_is_sealed_to_a_key_opens_with_it_alone() -> None:
    key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    sealed = seal_to(key.public_key(), SECRET)
    assert SECRET not in sealed
    assert open_sealed(key, sealed) == SECRET
    for wrong, bytes_ in ((other, sealed), (key, sealed[:-1]), (key, b""), (key, bytes([5]) + sealed[1:])):
        with pytest.raises(IdentityError, match="not sealed to this host"):
            open_sealed(wrong, bytes_)


def test_a_signing_request_shows_a_key_of_the_right_curve() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    request = signing_request(key)
    assert key_digest(requested_key(request)) == key_digest(key.public_key())
    tampered = bytearray(request)
    tampered[-1] ^= 1
    for wrong in (b"", b"x", bytes(tampered), signing_request(ec.generate_private_key(ec.SECP384R1()))):
        with pytest.raises(IdentityError):
            requested_key(wrong)
    with pytest.raises(IdentityError, match="curve P-256"):
        key_digest(ed25519.Ed25519PrivateKey.generate().public_key())
