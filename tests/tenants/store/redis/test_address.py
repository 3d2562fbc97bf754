from pathlib import Path

import pytest
from redis.asyncio import SSLConnection

from tenants.open import open_store, safe_url
from tenants.store.redis.address import SENTINEL_PORT, read_address
from tenants.store.settings import StoreConfig


def test_a_sentinel_url_names_sentinels_primary_database_and_both_logins() -> None:
    url = "sentinel://ann:p%40ss@a:1,b,[::1]:3/main/2?sentinel_username=eve&sentinel_password=s%26t"
    address = read_address(url)
    assert address.sentinels == (("a", 1), ("b", SENTINEL_PORT), ("::1", 3))
    assert address.service == "main"
    assert {name: address.options[name] for name in ("username", "password", "db")} == {
        "username": "ann",
        "password": "p@ss",
        "db": 2,
    }
    assert address.sentinel_options is not None
    assert (address.sentinel_options["username"], address.sentinel_options["password"]) == ("eve", "s&t")
    assert "host" not in address.options


def test_a_password_of_the_primary_is_not_told_to_sentinels() -> None:
    address = read_address("sentinel://ann:secret@a/main")
    assert address.sentinel_options is not None
    assert not {"username", "password"} & address.sentinel_options.keys()


def test_sentinels_with_tls_and_the_primary_trust_the_same_authorities(tmp_path: Path) -> None:
    authorities = tmp_path / "a ca+1.pem"
    authorities.write_text("")
    address = read_address(StoreConfig(url="sentinels://a,b/main", ca=str(authorities)).full_url(""))
    assert address.connection_class is SSLConnection
    assert address.sentinel_options is not None
    assert address.options["ssl_ca_certs"] == address.sentinel_options["ssl_ca_certs"] == str(authorities)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sentinel://a,b", "lacks the name"),
        ("sentinel://a,b/", "lacks the name"),
        ("sentinel:///main", "'' for a Sentinel"),
        ("sentinel://a,,b/main", "'' for a Sentinel"),
        ("sentinel://a:port/main", "'a:port' for a Sentinel"),
        ("sentinel://a:0/main", "'a:0' for a Sentinel"),
        ("sentinel://a:99999/main", "'a:99999' for a Sentinel"),
        ("sentinel://a/main/zero", "'zero' for a database"),
        ("sentinel://a/main?sentinel_pasword=x", "not known: 'sentinel_pasword'"),
        ("redis://a/0?socket_timeut=1", "not known: 'socket_timeut'"),
        ("redis://a:port/0", "Port could not be cast"),
        ("redis://a/0?ssl_ca_certs=/etc/ca.pem", "write rediss://"),
        ("sentinel://a/main?ssl_ca_certs=/etc/ca.pem", "write rediss://"),
        ("rediss://a/0?ssl_ca_certs=/nowhere/ca.pem", "no file that can be read"),
        ("postgres://a/0", "neither sqlite:PATH nor redis://HOST:PORT/DB nor sentinel://"),
    ],
)
def test_a_url_that_cannot_be_says_what_is_wrong(url: str, says: str) -> None:
    with pytest.raises(ValueError, match="store") as raised:
        open_store(url)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "redis://a/0", "ca": "ca.pem"}, "begins with rediss://"),
        ({"ca": "ca.pem"}, "begins with rediss://"),
        ({"url": "rediss://a/0", "key": "key.pem"}, "go together"),
    ],
)
def test_settings_that_cannot_be_say_what_is_wrong(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        StoreConfig(**settings)


def test_a_url_for_people_has_no_secret() -> None:
    assert safe_url("sentinel://ann:secret@a,b/main?sentinel_password=secret") == "sentinel://a,b/main"
    assert safe_url("redis://a/0?password=secret") == "redis://a/0"
    assert safe_url("sqlite:/srv/a@b?c.db") == "sqlite:/srv/a@b?c.db"
