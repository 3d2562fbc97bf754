"""[store] of hearth.toml, as a URL that opens the store. It opens nothing."""

from typing import Annotated, Final
from urllib.parse import urlencode

import msgspec
from msgspec import Meta

TLS_SCHEMES: Final = ("rediss://", "sentinels://")


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[store]: where accounts, quotas and usage are kept."""

    url: Annotated[
        str | None,
        Meta(
            description="sqlite:PATH for one gateway; for many redis://HOST:PORT/DB or sentinel://HOST,HOST,HOST/NAME, "
            "with TLS rediss:// and sentinels://; default sqlite in state_folder"
        ),
    ] = None
    ca: Annotated[
        str, Meta(description="PEM file of the authorities that sign the store's certificates; default: the system's")
    ] = ""
    certificate: Annotated[
        str, Meta(description="PEM file of the certificate that the store asks its clients for; with `key`")
    ] = ""
    key: Annotated[str, Meta(description="PEM file of that certificate's private key, not encrypted")] = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("`certificate` and `key` go together; one of them is missing")
        if (self.ca or self.certificate) and not (self.url or "").startswith(TLS_SCHEMES):
            raise ValueError("`ca` and `certificate` are for TLS: `url` begins with rediss:// or sentinels:// then")

    def full_url(self, default: str) -> str:
        """The URL with the files as its options."""
        named = {"ssl_ca_certs": self.ca, "ssl_certfile": self.certificate, "ssl_keyfile": self.key}
        options = urlencode({name: path for name, path in named.items() if path})
        url = self.url or default
        return f"{url}{'&' if '?' in url else '?'}{options}" if options else url
