"""Names of hosts in certificates."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.identity.host_identity import HostIdentity, HostRole, IdentityError, parse_identity, peer_identity

_names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
_places = st.text(string.ascii_lowercase + string.digits + "-", max_size=32)


@settings(max_examples=40, deadline=None)
@given(_names, st.sampled_from(HostRole), _names, _places, _places)
def test_an_identity_comes_back_from_its_uri(cluster: str, role: HostRole, name: str, region: str, site: str) -> None:
    identity = HostIdentity(cluster, role, name, region, site)
    assert parse_identity(identity.uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://c/machine/m1",
        "spiffe://c",
        "spiffe://c/machine",
        "spiffe://c/machine/",
        "spiffe://c/machine/m1/gateway/g1",
        "spiffe://c/machine/m1/machine/m2",
        "spiffe://c/ns/default/sa/hearth",
        "spiffe://c/region/eu/machine/m1/extra/1",
        "spiffe://c/operator/m1",
        "spiffe://C/machine/m1",
        "spiffe://c/machine/m1%2F..",
        "spiffe://c/machine/a..b",
        "spiffe://c/region/EU/machine/m1",
    ],
)
def test_what_names_no_host_is_refused(uri: str) -> None:
    with pytest.raises(IdentityError):
        parse_identity(uri)


def test_a_certificate_names_one_host() -> None:
    names = (("DNS", "m1"), ("URI", "spiffe://c/machine/m1"))
    assert peer_identity({"subjectAltName": names}) == HostIdentity("c", HostRole.MACHINE, "m1")
    for certificate in (None, {}, {"subjectAltName": (*names, ("URI", "spiffe://c/gateway/g1"))}):
        with pytest.raises(IdentityError, match="is to have one"):
            peer_identity(certificate)
