"""tenants/records/grants.py: what a credential may do, and words for what is no grant."""

import msgspec
import pytest

from tenants.records.grants import ENTRIES_MAX, Grant, Permission


def test_a_grant_of_nobodys_making_is_inference_with_all_models_from_everywhere() -> None:
    grant = Grant()
    assert grant.permits(Permission.INFERENCE)
    assert not any(grant.permits(other) for other in Permission if other is not Permission.INFERENCE)
    assert grant.serves("@cf/meta/llama-3.1-8b-instruct")
    assert grant.reaches("203.0.113.9")
    assert grant.reaches("")


@pytest.mark.parametrize(
    ("patterns", "model", "served"),
    [
        (("@cf/meta/*",), "@cf/meta/llama-3.1-8b", True),
        (("@cf/meta/*",), "@cf/metal/llama", False),
        (("@cf/meta/llama-?b", "@hf/*"), "@hf/x/y", True),
        (("@cf/meta/llama-?b",), "@cf/meta/llama-70b", False),
        (("@CF/*",), "@cf/meta/x", False),
        ((), "@cf/meta/x", False),
    ],
)
def test_models_are_served_by_pattern(patterns: tuple[str, ...], model: str, served: bool) -> None:
    assert Grant(models=patterns).serves(model) is served


@pytest.mark.parametrize(
    ("networks", "address", "reached"),
    [
        (("10.0.0.0/8",), "10.255.0.1", True),
        (("10.0.0.0/8",), "11.0.0.1", False),
        (("10.0.0.0/8",), "::ffff:10.0.0.1", True),
        (("10.0.0.0/8",), "::1", False),
        (("2001:db8::/32", "192.0.2.7/32"), "2001:db8::5", True),
        (("192.0.2.7/32",), "192.0.2.7", True),
        (("0.0.0.0/0",), "no address", False),
        (("0.0.0.0/0",), "", False),
    ],
)
def test_networks_bound_where_a_credential_opens(networks: tuple[str, ...], address: str, reached: bool) -> None:
    assert Grant(networks=networks).reaches(address) is reached


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"permissions": ()}, "without permissions"),
        ({"permissions": (Permission.INFERENCE,) * 2}, "twice"),
        ({"models": ("",)}, "model pattern"),
        ({"models": ("a\nb",)}, "model pattern"),
        ({"models": tuple(f"m{n}" for n in range(ENTRIES_MAX + 1))}, "the most is"),
        ({"networks": ("10.0.0.1/8",)}, "no network"),
        ({"networks": ("everywhere",)}, "no network"),
    ],
)
def test_what_is_no_grant_is_refused_in_words(changed: dict[str, tuple[str, ...]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Grant(**changed)  # type: ignore[arg-type]


def test_a_grant_survives_its_way_through_a_store_and_unknown_fields_do_not() -> None:
    grant = Grant((Permission.USAGE_READ,), ("@cf/*",), ("10.0.0.0/8",))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(grant), type=Grant) == grant
    assert msgspec.msgpack.encode(Grant()) == b"\x80"
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(b'{"scopes": []}', type=Grant)
