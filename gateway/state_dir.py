"""The state folder's own files: the server's secret and the first credentials. It knows no store and no HTTP."""

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engine.process.files import replace_file
from gateway.settings.config import Config, SettingsError

SECRET_BYTES = 32


class Credentials(msgspec.Struct, frozen=True):
    """`.hearth/credentials.json`: all that a first call needs."""

    base_url: str
    account_id: str
    token: str


def open_state(config: Config) -> None:
    """Makes the folders, for this user alone. Raises SettingsError where it cannot."""
    for folder in (config.state, config.run_folder, config.outbox_folder, config.models_folder):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"cannot make {folder}: {error.strerror}; --state names another folder") from error
    if config.run_folder.stat().st_uid != os.getuid():
        raise SettingsError(f"{config.run_folder} belongs to somebody else: set machine.folder")


@contextlib.contextmanager
def exclusive_state(config: Config) -> Iterator[None]:
    """Keeps every `hearth serve` out of these folders until it ends. Raises SettingsError where one runs."""
    with open(config.state / "serve.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"`hearth serve` runs already in {config.state}; --state names another folder"
            ) from None
        yield


def server_secret(config: Config) -> bytes:
    """The secret from which tokens' seals and scopes are derived; the first caller makes it."""
    open_state(config)
    path = config.secret_path
    if not path.exists():
        _write_new(path, secrets.token_hex(SECRET_BYTES).encode() + b"\n")
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError as error:
        raise SettingsError(f"{path} must hold {SECRET_BYTES} bytes in hex: restore it from a backup") from error
    if len(secret) < SECRET_BYTES:
        raise SettingsError(f"{path} is too short: it must hold {SECRET_BYTES} bytes in hex")
    return secret


def adopt_secret(config: Config, secret: bytes) -> None:
    """Keeps the secret of the gateways that this host has joined. Raises SettingsError where it has another one."""
    open_state(config)
    _write_new(config.secret_path, secret.hex().encode() + b"\n")
    if server_secret(config) != secret:
        raise SettingsError(
            f"{config.secret_path} is not the secret of the gateways that this host joins: "
            "move it away if nothing of this host's own store is needed, or --state names another folder"
        )


def read_credentials(config: Config) -> Credentials | None:
    """The credentials of the first start; None without a file that can be read."""
    try:
        return msgspec.json.decode(config.credentials_path.read_bytes(), type=Credentials)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def write_credentials(config: Config, credentials: Credentials) -> None:
    """Replaces the file in one piece, readable by this user alone."""
    replace_file(config.credentials_path, msgspec.json.format(msgspec.json.encode(credentials)) + b"\n")


def _write_new(path: Path, content: bytes) -> None:
    """Makes the file in one piece, for this user alone; does nothing where it exists already."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as unfinished:
        unfinished.write(content)
        unfinished.flush()
        os.fsync(unfinished.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(unfinished.name, path)
