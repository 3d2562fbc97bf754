"""The certificate that clients see: read from PEM files, and again when these change. It knows no connections.

A connection keeps what it began with; only new ones get the new certificate. Files that cannot be used leave the
previous certificate in force, and are logged once.
"""

import datetime
import logging
import ssl
from typing import Final

from engine.process.files import file_stamp
from gateway.settings.config import SettingsError
from gateway.settings.server import ServerConfig

_CIPHERS: Final = "ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2; those of TLS 1.3 are all sound

log = logging.getLogger(__name__)


class Certificate:
    """`context` is for new connections. Raises SettingsError if the first certificate cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._paths = (certificate, key)
        self._stamps = [file_stamp(path) for path in self._paths]
        self.context = server_context(certificate, key)

    def refresh(self) -> None:
        """Reads files that have changed. Costs two calls of stat."""
        stamps = [file_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self.context = server_context(*self._paths)
        except SettingsError as error:
            log.error("the certificate before stays in use: %s", error)
        else:
            log.warning("new connections get the new certificate of %s", self._paths[0])


def open_certificate(server: ServerConfig) -> Certificate | None:
    """Returns None if [server] names no certificate. Raises SettingsError, which names the file and its fault."""
    return Certificate(server.certificate, server.key) if server.certificate else None


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """Builds a context for TLS 1.2 and 1.3 with forward secrecy, HTTP/1.1 alone. Raises SettingsError."""
    for name, path in (("certificate", certificate), ("key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise SettingsError(f"the {name} {path} cannot be read: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_ciphers(_CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key, password="")  # no prompt for a password: nobody is there
    except ssl.SSLError as error:
        raise SettingsError(_problem(error, certificate, key)) from None
    return context


def expiry(certificate: str) -> datetime.datetime:
    """When the certificate itself, the first in its file, expires. Raises SettingsError."""
    from cryptography import x509  # only here: serving does without

    try:
        with open(certificate, "rb") as file:
            return x509.load_pem_x509_certificates(file.read())[0].not_valid_after_utc
    except (OSError, ValueError) as error:
        raise SettingsError(f"the certificate {certificate} cannot be read: {error}") from None


def _problem(error: ssl.SSLError, certificate: str, key: str) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"the key {key} is not that of the certificate {certificate}"
    reason = error.reason or str(error)
    return f"{certificate} and {key} are no certificate chain and unencrypted key in PEM: {reason}"
